"""A batch that grows at the beginning of a run: `Rampup` and how many rows it gives each batch. Imports no torch."""

from headway.config.section import Section, setting


class Rampup(Section):
    """A growing batch: `start` rows, then `add` more rows after every `every` batches, up to the full batch."""

    start: int = setting(..., "Rows of the first batches.", gt=0)
    add: int = setting(..., "Rows added each time.", gt=0)
    every: int = setting(..., "Batches between two additions.", gt=0)
    per_rank: bool = setting(
        False, "start and add count rows of each data-parallel rank, not of all together."
    )

    def over(self, ranks: int) -> "Rampup":
        """With rows counted over all ranks."""
        if not self.per_rank:
            return self
        return self.model_copy(
            update={"start": self.start * ranks, "add": self.add * ranks, "per_rank": False}
        )


def batch_rows(rows: int, rampup: Rampup | None, batch: int) -> int:
    """Rows of batch number `batch` (from 0)."""
    return (
        rows if rampup is None else min(rows, rampup.start + rampup.add * (batch // rampup.every))
    )


def rows_before(rows: int, rampup: Rampup | None, batch: int) -> int:
    """Rows of all batches before number `batch`."""
    if rampup is None:
        return rows * batch
    growing = max(0, -(-(rows - rampup.start) // rampup.add)) * rampup.every
    grown = min(batch, growing)
    whole, rest = divmod(grown, rampup.every)
    before = rampup.every * (
        whole * rampup.start + rampup.add * (whole * (whole - 1) // 2)
    ) + rest * (rampup.start + rampup.add * whole)
    return before + rows * (batch - grown)
