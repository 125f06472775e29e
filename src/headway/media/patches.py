"""Pictures at their own size, as a published vision model takes them: a file comes in, square cells
of pixels go out. Imports without torch.

    picture   height x width, upright, RGB
      -> resized so that both sides are multiples of patch * merge pixels, and the area is allowed
      -> cells [h w, merge, merge, 3, patch, patch] uint8, row by row: one cell is one position of
         the language model, and merge * merge patches of the tower
      -> patches [h w merge merge, 3 * frames * patch * patch] float32: what the tower reads

The rule of sizes and the order of patches are those of Qwen2-VL (Wang 2024,
https://arxiv.org/abs/2409.12191) and equal those of its processor in transformers bit for bit.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headway.errors import ConfigError, DataError
from headway.media.image_header import IMAGE_KINDS, ORIENTATION, image_size, orientation
from headway.media.items import LIMITS, MediaLimits, MediaRef, check_pixels, open_image
from headway.runtime.optional import need

Array = np.ndarray[Any, Any]
Grid = tuple[int, int]
"""Rows and columns of cells of one picture."""

MAX_RATIO = 200
"""The longer side of a picture over the shorter one, at most."""
TURNED = (5, 6, 7, 8)
"""Orientations of EXIF whose upright picture has the sides exchanged."""
BICUBIC = 3
"""The filter of Pillow, as files of processors number it."""
PROCESSORS = (
    "Qwen2VLImageProcessor",
    "Qwen2VLImageProcessorFast",
    "Qwen2VLImageProcessorPil",
    "Qwen2_5_VLImageProcessor",
)
"""Names of the processor in preprocessor_config.json."""
ALWAYS_DONE = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb")


@dataclass(frozen=True)
class PictureSpec:
    """How a picture becomes patches. Its repr is part of cache keys."""

    patch: int = 14
    """Pixels of a side of a patch."""
    merge: int = 2
    """Patches of a side of a cell."""
    frames: int = 2
    """Frames that a patch spans; a picture is repeated so often."""
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280
    mean: tuple[float, float, float] = (0.48145466, 0.4578275, 0.40821073)
    std: tuple[float, float, float] = (0.26862954, 0.26130258, 0.27577711)
    rescale: float = 1 / 255

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> PictureSpec:
        """A spec from plain values."""
        colours = {key: tuple(values[key]) for key in ("mean", "std") if key in values}
        return cls(**{**values, **colours})

    @property
    def side(self) -> int:
        """Pixels of a side of a cell."""
        return self.patch * self.merge

    @property
    def cell_shape(self) -> tuple[int, ...]:
        """The shape of one cell."""
        return (self.merge, self.merge, 3, self.patch, self.patch)

    @property
    def cell_bytes(self) -> int:
        """Bytes of one cell."""
        return 3 * self.side**2

    @property
    def patch_width(self) -> int:
        """Numbers of one patch."""
        return 3 * self.frames * self.patch**2

    def problem(self) -> str | None:
        """Why pictures cannot be read so; None if they can."""
        sizes = {"patch_size": self.patch, "merge_size": self.merge, "frames": self.frames}
        for name, value in sizes.items():
            if not 1 <= value <= 256:
                return f"{name} is {value}; it must be 1 to 256"
        if not self.side**2 <= self.max_pixels or not 0 < self.min_pixels <= self.max_pixels:
            return (
                f"pictures have {self.min_pixels} to {self.max_pixels} pixels; the least must be "
                f"above 0, and the most not below it, nor below one cell ({self.side**2})"
            )
        if len(self.mean) != 3 or len(self.std) != 3 or not all(value > 0 for value in self.std):
            return f"mean is {self.mean} and std {self.std}; three numbers each, std above 0"
        return None

    def fit(self, width: int, height: int, name: str) -> Grid:
        """Rows and columns of cells of a picture of a size.

        Both sides are rounded to cells. A picture whose area is then outside of the limits is
        scaled by sqrt(limit / area) first, and its sides rounded towards the allowed area.
        """
        if max(width, height) > MAX_RATIO * min(width, height):
            raise DataError(
                f"{name}: {width} x {height} pixels; one side is more than {MAX_RATIO} times the "
                "other. Crop it."
            )
        side = self.side
        rows = round(height / side)
        columns = round(width / side)
        if rows * columns * side**2 > self.max_pixels:
            shrink = math.sqrt((height * width) / self.max_pixels)
            rows = max(1, math.floor(height / shrink / side))
            columns = max(1, math.floor(width / shrink / side))
        elif rows * columns * side**2 < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            rows = math.ceil(height * grow / side)
            columns = math.ceil(width * grow / side)
        return rows, columns

    def values(self) -> Array:
        """float32 [3, 256]: the normalised value of every byte, for each colour."""
        scaled = (np.arange(256, dtype=np.float64) * self.rescale).astype(np.float32)
        mean = np.array(self.mean, np.float32)
        std = np.array(self.std, np.float32)
        return (scaled[None] - mean[:, None]) / std[:, None]


def spec_of(settings: Mapping[str, Any], place: str) -> PictureSpec:
    """The spec that a preprocessor_config.json describes; what headway does not do is refused."""
    kind = settings.get("image_processor_type")
    if kind is not None and kind not in PROCESSORS:
        raise ConfigError(
            f"{place}: image_processor_type is {str(kind)[:60]!r}; headway reads "
            f"{PROCESSORS[0]}. Take the file of the model."
        )
    for key in ALWAYS_DONE:
        if settings.get(key, True) is not True:
            raise ConfigError(f"{place}: {key} is {settings[key]!r}; headway always does it.")
    if settings.get("resample", BICUBIC) != BICUBIC:
        raise ConfigError(
            f"{place}: resample is {settings['resample']!r}; headway does bicubic (3)."
        )

    size = settings.get("size") or {}
    values: dict[str, Any] = {
        "patch": settings.get("patch_size"),
        "merge": settings.get("merge_size"),
        "frames": settings.get("temporal_patch_size"),
        "min_pixels": settings.get("min_pixels") or _of(size, "shortest_edge", "min_pixels"),
        "max_pixels": settings.get("max_pixels") or _of(size, "longest_edge", "max_pixels"),
        "mean": settings.get("image_mean"),
        "std": settings.get("image_std"),
        "rescale": settings.get("rescale_factor"),
    }
    spec = PictureSpec()
    try:
        spec = PictureSpec.parse({key: value for key, value in values.items() if value is not None})
        problem = spec.problem()
    except (TypeError, ValueError, OverflowError) as error:
        problem = str(error)
    if problem is not None:
        raise ConfigError(f"{place}: does not say how pictures are read: {problem[:300]}.")
    return spec


def _of(size: Any, *names: str) -> Any:
    if not isinstance(size, Mapping):
        return None
    return next((size[name] for name in names if size.get(name)), None)


def grid_of(ref: MediaRef, spec: PictureSpec, limits: MediaLimits = LIMITS) -> Grid:
    """The cells of a picture, from its header alone."""
    data = _bytes_of(ref, limits)
    _, width, height = image_size(data, ref.name)
    check_pixels(ref.name, width, height, limits)
    need("PIL", ref.name)
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data), formats=IMAGE_KINDS) as image:
            if image.getexif().get(ORIENTATION) in TURNED:
                width, height = height, width
    except Exception as error:  # Pillow's plugins raise many types for damaged files
        raise DataError(f"{ref.name}: the picture is damaged or cut short ({error}).") from None
    return spec.fit(width, height, ref.name)


def header_grid(ref: MediaRef, spec: PictureSpec, limits: MediaLimits = LIMITS) -> Grid:
    """The same without a library that decodes pictures, for bytes of strangers.

    It knows no orientation but that of EXIF; `read_cells` says where that makes a difference.
    """
    data = _bytes_of(ref, limits)
    _, width, height = image_size(data, ref.name)
    check_pixels(ref.name, width, height, limits)
    if orientation(data) in TURNED:
        width, height = height, width
    return spec.fit(width, height, ref.name)


def read_cells(
    ref: MediaRef, spec: PictureSpec, limits: MediaLimits = LIMITS
) -> tuple[Grid, Array]:
    """The cells of a picture, uint8 [rows * columns, *cell_shape]; transparency is left out."""
    data = _bytes_of(ref, limits)
    _, width, height = image_size(data, ref.name)
    check_pixels(ref.name, width, height, limits)
    need("PIL", ref.name)
    from PIL import Image

    image = open_image(data, ref.name, limits).convert("RGB")
    rows, columns = spec.fit(image.width, image.height, ref.name)
    size = (columns * spec.side, rows * spec.side)
    if image.size != size:
        image = image.resize(size, Image.Resampling.BICUBIC)
    pixels = np.asarray(image, np.uint8)

    # [rows, merge, patch, columns, merge, patch, 3] -> one cell after another.
    merge = spec.merge
    patch = spec.patch
    cut = pixels.reshape(rows, merge, patch, columns, merge, patch, 3)
    cells = cut.transpose(0, 3, 1, 4, 6, 2, 5).reshape(rows * columns, *spec.cell_shape)
    return (rows, columns), np.ascontiguousarray(cells)


def _bytes_of(ref: MediaRef, limits: MediaLimits) -> bytes:
    if ref.part:
        raise DataError(
            f"{ref.name}: is a video, and the model's own tower is given pictures. Give some of "
            "its frames as files."
        )
    return ref.read(limits)


def rotary_positions(length: int, pictures: Sequence[tuple[int, Grid]]) -> Array:
    """int32 [length, 3]: the time, row and column by which each token of a document is rotated.

    Text counts on by one, the same in all three. The cells of a picture that begins at position p
    stand at (p, p + row, p + column); text continues at p + max(rows, columns).

    `pictures`: where each begins in the document, and its cells, in order.
    """
    positions = np.repeat(np.arange(length, dtype=np.int32)[:, None], 3, axis=1)
    for offset, (rows, columns) in pictures:
        begin = int(positions[offset, 0]) if offset < length else 0
        count = rows * columns
        end = min(offset + count, length)
        row, column = np.divmod(np.arange(end - offset, dtype=np.int32), columns)
        positions[offset:end, 0] = begin
        positions[offset:end, 1] = begin + row
        positions[offset:end, 2] = begin + column
        after = np.arange(length - end, dtype=np.int32) + begin + max(rows, columns)
        positions[end:] = after[:, None]
    return positions
