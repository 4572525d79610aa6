"""Of how many rows latencies are, where files or the model do not take the batch of the budget."""

from __future__ import annotations

import logging

from compresskit.base.errors import SettingError
from compresskit.base.task import batch_size, shapes_of
from compresskit.search.proxy.held_out import has_rows
from compresskit.search.proxy.workshop import Workshop

log = logging.getLogger(__name__)


def check_timed_batch(workshop: Workshop, *, asked: bool = True) -> str:
    """A remark on latencies that are of the whole first batch, since the inputs do not say what a row is or the model takes no
    fewer; "" where they are of as many rows as the budget says.

    asked: whether the budget has a latency, or a batch of its own.

    Raises SettingError where files take another number of rows alone, and where it is asked and the model does.
    """
    dims, batch, timed = workshop.dims, workshop.batch, workshop.timed_inputs()
    name = type(workshop.model).__name__
    if (rows := batch_size(timed, dims)) == batch:
        return ""
    if dims is not None and all(dim is None for dim in dims):
        raise SettingError(
            f"at_most(batch={batch}): with compress(dynamic={workshop.dynamic!r}) files take batches of {rows} rows alone,"
            f" as the validation data have; write at_most(batch={rows}), or give the batch in dynamic="
        )
    if asked and (dims is not None or has_rows(timed)):
        raise SettingError(
            f"at_most(batch={batch}): {name} does not run on a batch of {batch}, but on the {rows} of the first validation batch;"
            f" write at_most(batch={rows}) for latencies of those, or give a model that takes any number"
        )
    log.warning("compress: %s takes no part of a batch, so latencies are of the whole first one, %s", name, shapes_of(timed))
    return f". Latencies are of the whole first validation batch, with inputs of shapes {shapes_of(timed)}"
