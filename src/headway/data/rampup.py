"""A batch that grows at the beginning of a run: `Rampup` and how many rows it gives each batch.
Imports no torch."""

from headway.config.section import Section, setting


class Rampup(Section):
    """A growing batch: `start` rows, then `add` more rows after every `every` batches, up to the
    full batch."""

    start: int = setting(..., "Rows of the first batches.", gt=0)
    add: int = setting(..., "Rows added each time.", gt=0)
    every: int = setting(..., "Batches between two additions.", gt=0)
    per_rank: bool = setting(
        False, "start and add count rows of each data-parallel rank, not of all together."
    )

    def over(self, ranks: int) -> "Rampup":
        """The same growth with rows counted over all ranks."""
        if not self.per_rank:
            return self
        return self.model_copy(
            update={"start": self.start * ranks, "add": self.add * ranks, "per_rank": False}
        )


def batch_rows(rows: int, rampup: Rampup | None, batch: int) -> int:
    """Rows of batch number `batch` (from 0)."""
    if rampup is None:
        return rows
    return min(rows, rampup.start + rampup.add * (batch // rampup.every))


def rows_before(rows: int, rampup: Rampup | None, batch: int) -> int:
    """Rows of all batches before number `batch`: the sum of `batch_rows`, in closed form."""
    if rampup is None:
        return rows * batch

    # Batches before the full size is reached; after them every batch has `rows`.
    num_growing = max(0, -(-(rows - rampup.start) // rampup.add)) * rampup.every
    growing = min(batch, num_growing)

    # `levels` complete runs of `every` batches (start, start + add, ...), then a run that has
    # begun.
    levels, in_level = divmod(growing, rampup.every)
    level_rows = levels * rampup.start + rampup.add * (levels * (levels - 1) // 2)
    before = rampup.every * level_rows + in_level * (rampup.start + rampup.add * levels)
    return before + rows * (batch - growing)
