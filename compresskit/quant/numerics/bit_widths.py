"""How many bits the weights and the activations of each layer take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from compresskit.base.errors import SettingError
from compresskit.base.settings import as_python, check_field_types, stands_in
from compresskit.quant.numerics.targets import Target


@dataclass(frozen=True, kw_only=True)
class Bits:
    """Bit widths of a layer; None leaves those of the target.

    weights: 1 to 8. Files store as many bits (4 as int4, 2 as int2 of opset 25 but for OpenVINO, others as bit planes), 7 in 8.
        Two bits are the three values -1, 0 and 1 times the scale; one bit is -1 and 1 times the scale, which only training makes
        useful (`QAT`).
    activations: of the value that the layer reads, 1 to 16. Up to 8 run in the integer kernels of 8 bits, and take no less time;
        with more, the layer runs in float. One bit is 0 and the scale, behind a ReLU.
    shortcuts: of values that operators without weights read, such as both operands of an addition, 2 to 16. A layer that reads
        such a value, too, rounds it again to its own `activations`. None rounds it once, as the layer wants it.

    Raises SettingError for other numbers.
    """

    weights: int | None = None
    activations: int | None = None
    shortcuts: int | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():  # NumPy's numbers become Python's, which a record can have
            object.__setattr__(self, name, as_python(value))
        check_field_types(self)
        given = (("weights", self.weights, 1, 8), ("activations", self.activations, 1, 16), ("shortcuts", self.shortcuts, 2, 16))
        for name, value, least, most in given:
            if value is not None and not least <= value <= most:
                raise SettingError(f"Bits({name}=...): wanted {least}..{most}, got {value}")


#: Bit widths of a model: the same for all layers, or dotted name of a module -> those of the layers in it; "" names the model.
BitWidths = Bits | Mapping[str, Bits]
TARGET_BITS = Bits()  # those of the target everywhere


def check_bits(bits: object, where: str) -> None:
    """Raise SettingError, which begins with `where`, for anything but `BitWidths`."""
    if isinstance(bits, Bits):
        return
    if not isinstance(bits, Mapping) or not all(isinstance(k, str) and isinstance(v, Bits) for k, v in bits.items()):
        raise SettingError(f'{where}(bits=...): wanted Bits(...) or {{"name of a module": Bits(...)}}, got {bits!r}')


def bits_of_layer(bits: BitWidths, path: str) -> Bits:
    """The bit widths of a layer: each of the longest name in `bits` that the layer's dotted name lies in and that gives it.

    >>> bits_of_layer({"": Bits(weights=4, activations=8), "layer1": Bits(weights=8)}, "layer1.0.conv1")
    Bits(weights=8, activations=8)
    """
    if isinstance(bits, Bits):
        return bits
    found = Bits()
    for name in sorted(bits, key=len):
        if name == "" or stands_in(path, [name]):
            given = {key: value for key, value in asdict(bits[name]).items() if value is not None}
            found = replace(found, **given)
    return found


def named_modules(bits: BitWidths) -> tuple[str, ...]:
    """The dotted names of modules that have bit widths of their own."""
    return () if isinstance(bits, Bits) else tuple(name for name in bits if name)


def check_bit_names(bits: BitWidths, paths: Iterable[str]) -> None:
    """Raise SettingError for a name in `bits` that no layer lies in. paths: dotted names of the layers with weights."""
    layers = sorted(set(paths))
    for name in () if isinstance(bits, Bits) else bits:
        if name and not any(stands_in(path, [name]) for path in layers):
            raise SettingError(
                f"bits={{{name!r}: ...}}: no layer with weights stands in a module of that name; the layers are {layers}"
            )


def refuse_one_bit(bits: BitWidths, where: str) -> None:
    """Raise SettingError, which begins with `where`, for widths of one bit, which rounding without training does not stand."""
    for name, given in {"": bits}.items() if isinstance(bits, Bits) else bits.items():
        if 1 in (given.weights, given.activations):
            place = f"{name!r}: " if name else ""
            raise SettingError(
                f"{where}(bits=...): {place}one bit needs training with learned scales; write QAT(bits=..., learned=True), or"
                " take 2 bits"
            )


def check_target_takes(bits: Bits, target: Target, where: str) -> None:
    """Raise SettingError where a target cannot express bit widths. where: the layer, for the message."""
    if bits.shortcuts is not None and bits.shortcuts != bits.activations:
        check_target_takes(replace(bits, activations=bits.shortcuts, shortcuts=None), target, where)
    replace(
        target,
        activations=replace(target.activations, bits=bits.activations or target.activations.bits),
        weights=replace(target.weights, bits=bits.weights or target.weights.bits),
        name=f"{target.name}, {where}" if where else target.name,
    )


def bits_record(bits: BitWidths) -> Any:
    """JSON-ready form of bit widths, which `bits_from_record` reads."""
    return asdict(bits) if isinstance(bits, Bits) else {"layers": {name: asdict(given) for name, given in bits.items()}}


def bits_from_record(saved: Mapping[str, Any]) -> BitWidths:
    """Bit widths of a record. Raises TypeError, KeyError or SettingError for another one."""
    return {str(name): Bits(**given) for name, given in saved["layers"].items()} if "layers" in saved else Bits(**saved)
