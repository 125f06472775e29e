"""An aligner in the files that others read: aligner.safetensors, PurrSight's aligner.pt, or a
folder with the trained encoders too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headway.errors import CheckpointError, ConfigError
from headway.export.huggingface import atomic_folder
from headway.infer.aligner import find_aligner
from headway.model.loading.aligner_file import (
    heads_of,
    is_aligner_folder,
    read_aligner,
    write_aligner,
    write_aligner_folder,
)
from headway.runtime.storage import check_writable, writing


def export_aligner(model: Path, out: Path) -> dict[str, Any]:
    """Write an aligner; what was written, in plain values. A file of heads is converted between the
    two forms.
    """
    check_writable(out.parent)

    # A file holds heads alone. A run, a checkpoint or a folder also holds trained encoders.
    stored = None
    if model.is_file():
        heads = read_aligner(model)
    else:
        stored = find_aligner(model)
        heads = heads_of(stored.weights, stored.log_scales)

    if out.suffix in (".pt", ".safetensors"):
        write_aligner(heads, out)
    elif stored is None:
        raise ConfigError(
            f"out is {str(out)!r}; a file of heads is converted to a file. Give a name that ends "
            "in .safetensors or .pt."
        )
    else:
        if out.exists() and not is_aligner_folder(out) and (not out.is_dir() or any(out.iterdir())):
            raise ConfigError(
                f"out is {str(out)!r}, which holds something else. Give a folder that does not "
                "exist yet."
            )
        with writing(out, error=CheckpointError), atomic_folder(out) as folder:
            write_aligner_folder(folder, stored.config, stored.weights, stored.log_scales)

    widths = {name: heads.width_of(name) for name in heads.modalities}
    return {"out": str(out), "dim": heads.dim, "widths": widths, "log_scales": heads.log_scales}
