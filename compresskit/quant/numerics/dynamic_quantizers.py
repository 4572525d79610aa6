"""Quantizers of dynamic quantization: activations rounded to the range of each call, embedding rows, LSTMs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from compresskit.export.ops.lstm import simulate_dynamic_lstm
from compresskit.export.ops.quantize import round_dynamically
from compresskit.graph.recurrent import OPERATORS, recurrent_cells
from compresskit.quant.numerics.quantizers import Quantizer, WeightQuantizer
from compresskit.quant.numerics.saturation import PairPacking
from compresskit.quant.numerics.scheme import Scheme


class DynamicActivation(Quantizer):
    """Rounds an activation to uint8 over the range of the present call."""

    of_activations = True

    def forward(self, x: Tensor) -> Tensor:
        return round_dynamically(x) if self.enabled else x


class RowQuantizer(Quantizer):
    """Rounds rows that were looked up in an embedding table as the stored table holds them: (rows, table) -> rows.

    packing: of a product that reads the same table, whose pairs must fit.
    """

    def __init__(self, scheme: Scheme, packing: PairPacking | None = None) -> None:
        super().__init__()
        self.table = WeightQuantizer(scheme, 0, 1, packing)
        self.table.enabled = True

    def forward(self, rows: Tensor, table: Tensor) -> Tensor:
        if not self.enabled:
            return rows
        if not self.table.scheme.per_channel:
            scale, zero_point = self.table.qparams(table)
            exact = (rows.detach() / scale).reshape(-1, rows.shape[-1])
            if self.table.packing is None:
                low, high = self.table.scheme.low, self.table.scheme.high
                integers = (torch.round(exact) + zero_point).clamp(low, high)
            else:
                integers, _ = self.table.packing.round(exact, zero_point.view(1, 1), self.table.scheme)
            steps = (integers - zero_point).view(rows.shape)
            return rows + (steps * scale - rows).detach()
        flat = rows.reshape(-1, rows.shape[-1])  # each row has its own scale, so the table is not needed
        return self.table(flat).reshape(rows.shape)


class LstmQuantizer(Quantizer):
    """Replaces torch's LSTM operator: matrices in integers, inputs and states rounded to their range at run time.

    The recurrent matrix of an LSTM with projection is multiplied by the projection before rounding, as the file stores it
    (see `export.rewrite.recurrent`). fit_pairs: whether no pair of products may overflow, see `numerics.saturation`.
    floating: layers of the stack, from 0, that stay float.
    """

    def __init__(self, scheme: Scheme, *, fit_pairs: bool = False, floating: Iterable[int] = ()) -> None:
        super().__init__()
        self.floating = frozenset(floating)
        self.matrix = WeightQuantizer(scheme, 0, 1, PairPacking() if fit_pairs else None)
        self.matrix.enabled = True
        self.float_activations = False

    def pass_activations_(self, on: bool = True) -> None:
        """Let inputs and states pass in float, or round them again; matrices are rounded as before."""
        self.float_activations = on

    def unrounded(self, x: Any, *rest: Any) -> Any:
        """The output of torch's operator."""
        return OPERATORS["lstm"](x, *rest)

    def effective(self, weights: list[Tensor], *settings: Any) -> list[Tensor]:
        """The weights, recurrent matrices multiplied by the projection where there is one."""
        has_biases, layers, bidirectional = settings
        effective: list[Tensor] = []
        for layer in recurrent_cells(weights, has_biases, layers, bidirectional):
            for cell in layer:
                recurrent = cell.recurrent if cell.projection is None else cell.recurrent @ cell.projection
                effective += [cell.input, recurrent, *cell.biases, *([] if cell.projection is None else [cell.projection])]
        return effective

    def is_matrix(self, place: int, weights: list[Tensor], *settings: Any) -> bool:
        """Whether the weight at a position of the list is stored in integers: a matrix of a layer that does not stay float."""
        _, layers, bidirectional = settings
        directions = 2 if bidirectional else 1
        cell, part = divmod(place, len(weights) // (layers * directions))
        return part < 2 and cell // directions not in self.floating

    def forward(
        self,
        x: Tensor,
        state: list[Tensor],
        weights: list[Tensor],
        has_biases: bool,
        layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        settings = (has_biases, layers, bidirectional)
        if not self.enabled:
            return self.unrounded(x, state, weights, has_biases, layers, dropout, train, bidirectional, batch_first)
        whole = self.effective(weights, *settings)
        rounded = [self.matrix(w) if self.is_matrix(i, weights, *settings) else w for i, w in enumerate(whole)]
        floating = range(layers) if self.float_activations else self.floating
        return simulate_dynamic_lstm(x, state, rounded, *settings, batch_first, floating)
