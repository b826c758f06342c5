"""A film of an agent as an MP4: the emulator's picture, what the network sees, its value and action probabilities."""

import glob
import math
import os
import struct
import time
import warnings
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from cleanba.agents.policy import Policy
from cleanba.environments.action_names import action_names
from cleanba.environments.boards import draw_board
from cleanba.errors import Failure, UsageError, missing, said
from cleanba.networks.torsos import channels_first
from cleanba.rollout import Obs, PyTree
from cleanba.specs import ActionSpec, ObsSpecs

GAP = 12  # pixels between the parts
PICTURE = (480, 420)  # what the emulator's picture must fit into, width and height
TILE = 168  # side of one picture that the network sees
LINE = 22  # height of a line of text
BAR_LENGTH = 110  # of a probability of one
MOST_BARS = 40  # drawn at most, for actions of many parts
MOST_NUMBERS = 16  # of an observation's vectors that are shown
INK, DIM, PAPER, BAR, CHOSEN = "#e8e8e8", "#9a9a9a", "#15171c", "#4a6fa5", "#e0a030"


def require_films() -> ModuleType:
    """Import the optional library that writes films.

    Raises:
        UsageError: it is not installed.
    """
    try:
        import imageio.v2
        import imageio_ffmpeg

        imageio_ffmpeg.get_ffmpeg_exe()  # else imageio would only fail at the first frame
    except ImportError as error:
        raise missing("a film (--video, --capture-video)", error, "video") from None
    except RuntimeError as error:  # there is no binary for this system
        raise UsageError(f"films need ffmpeg ({said(error)}); install it, or leave out the film") from None
    return imageio.v2


OLD_SECONDS = 3600.0  # a film that has not grown for this long is no longer being written


class Film:
    """Frames of one environment's episode, written as they come.

    Frame t shows step t before its action: the picture, the observation, value and action probabilities, the action,
    and the score so far.  The last frame shows the end of the episode.  The file then gets its final name.
    """

    def __init__(self, path: Path, policy: Policy):
        """Raises `UsageError` if the library that writes films is missing."""
        self._imageio = require_films()
        self.path = path
        self.frames = 0
        self._policy = policy
        self._scratch = path.with_name(f".{path.stem}.{os.getpid()}.tmp.mp4")
        for left in path.parent.glob(f".{glob.escape(path.stem)}.*.tmp.mp4"):  # left behind by killed processes
            with suppress(OSError):
                if time.time() - left.stat().st_mtime > OLD_SECONDS:
                    left.unlink()
        self._writer: Any = None
        self._ended = False
        self._room: tuple[int, int] | None = None  # width and height of the first picture, as drawn
        self._names = action_names(policy.spec)
        self._grey = policy.spec.is_atari and bool(policy.spec.options.get("gray_scale", True))

        def look(params: PyTree, carry: PyTree, obs: Obs, first: jax.Array) -> dict[str, jax.Array]:
            shown = policy.algorithm.inspect(params, *jax.tree.map(lambda x: x[:1], (carry, obs, first)))
            return {name: x[0] for name, x in shown.items()}

        self._look = jax.jit(look)  # compiled apart from acting, so that it cannot change acting's bits

    def add(
        self,
        picture: np.ndarray,
        fps: float,
        params: PyTree,
        obs: Obs,
        first: np.ndarray,
        carry: PyTree,
        action: np.ndarray,
        score: float,
    ) -> None:
        """Add a step: picture [H, W, 3] uint8; obs, first, carry, action [B, ...], of which the first is shown."""
        shown: dict[str, np.ndarray] = jax.device_get(self._look(params, carry, obs, first))
        caption = "   ".join(f"{name} {figure(x)}" for name, x in shown.items() if x.ndim == 0)
        bars = next((x for x in shown.values() if x.shape == (len(self._names),)), np.zeros(len(self._names)))
        self._write(picture, fps, obs, score, caption, bars, bars_of(self._policy.spec.action, np.asarray(action)[0]))

    def end(self, picture: np.ndarray, fps: float, obs: Obs, score: float) -> None:
        """Add the last frame, picture [H, W, 3] uint8: the end of the episode, after which no action follows."""
        self._write(picture, fps, obs, score, "the end", np.zeros(len(self._names)), [])
        self._ended = True

    def end_unseen(self) -> None:
        """The episode has ended without a last frame: among the random no-ops after a life."""
        self._ended = True

    def _write(
        self,
        picture: np.ndarray,
        fps: float,
        obs: Obs,
        score: float,
        caption: str,
        values: np.ndarray,
        chosen: Collection[int],
    ) -> None:
        image = fit(picture, *PICTURE)
        self._room = self._room or image.size
        if image.size != self._room:  # the frames of a film must all have one size
            image, smaller = Image.new("RGB", self._room, PAPER), fit(np.asarray(image), *self._room)
            image.paste(smaller)
        parts = [
            captioned(image, f"step {self.frames}   score {score:g}"),
            captioned(see(seen(self._policy.spec.obs, obs), self._grey), "what the network sees"),
            captioned(draw_policy(self._names, values, chosen), caption),
        ]
        frame = np.asarray(side_by_side(parts))
        try:
            if self._writer is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._scratch.touch()  # fails with one sentence, ffmpeg with many
                self._writer = self._imageio.get_writer(
                    self._scratch,
                    format="FFMPEG",
                    fps=fps,
                    codec="libx264",
                    pixelformat="yuv420p",  # the one that all browsers play
                    macro_block_size=2,
                    output_params=["-movflags", "+faststart"],  # playback can begin before the download ends
                )
            with warnings.catch_warnings():  # JAX warns of every new process; this one only starts ffmpeg
                warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
                self._writer.append_data(frame)
        except OSError as error:
            reason = error.strerror or said(error)
            raise Failure(f"{self.path} cannot be written: {reason}; choose another place, or make room") from error
        self.frames += 1

    def close(self) -> None:
        """Finish the file if the episode ended; otherwise remove it."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
            if self._ended:
                if not is_whole(self._scratch):  # ffmpeg's own error is not passed on
                    self._scratch.unlink(missing_ok=True)
                    raise Failure(f"{self.path} cannot be written: ffmpeg did not finish it; is the disk full?")
                os.replace(self._scratch, self.path)
            else:
                self._scratch.unlink(missing_ok=True)


def is_whole(path: Path) -> bool:
    """Whether the boxes of an MP4 fill the file, and its index ("moov") is among them (ISO/IEC 14496-12)."""
    at, kinds = 0, set()
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        while at < size:
            file.seek(at)
            length, kind = struct.unpack(">I4s", file.read(8).ljust(8, b"\0"))
            if length == 1:  # the length follows, in 8 bytes
                (length,) = struct.unpack(">Q", file.read(8).ljust(8, b"\0"))
            if length < 8:
                return False
            kinds.add(kind)
            at += length
    return at == size and b"moov" in kinds


def fit(picture: np.ndarray, width: int, height: int) -> Image.Image:
    """Scale a picture [H, W, 3] uint8 into a box; a small one by a whole number, so that its pixels stay sharp."""
    image = Image.fromarray(np.ascontiguousarray(picture))
    scale = min(width / image.width, height / image.height)
    if scale >= 1:
        return image.resize((image.width * int(scale), image.height * int(scale)), Image.Resampling.NEAREST)
    size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
    return image.resize(size, Image.Resampling.LANCZOS)


def seen(spec: ObsSpecs, obs: Obs) -> dict[str, np.ndarray]:
    """The first of the observations [B, ...], as parts [...] by name: all but action masks, which no network sees."""
    parts = zip(jax.tree_util.tree_leaves_with_path(obs), jax.tree.leaves(spec), strict=True)
    visible = [(path, x) for (path, x), part in parts if part.kind != "mask"]
    return {".".join(str(key.key) for key in path): np.asarray(x[0]) for path, x in visible}


def see(parts: dict[str, np.ndarray], grey: bool = False) -> Image.Image:
    """Draw the parts [...] of an observation, one below the other: pictures and boards, then the numbers of the rest.

    grey: whether each plane of a stack is a picture, even where their number is a multiple of three.
    """
    drawn = {name: draw_part(x, grey) for name, x in parts.items()}
    images = [captioned(image, name) if name else image for name, image in drawn.items() if image is not None]
    numbers = {name: x for name, x in parts.items() if drawn[name] is None}
    images += [draw_numbers(numbers)] if numbers else []
    sheet = Image.new("RGB", (max(x.width for x in images), sum(x.height + 4 for x in images) - 4), PAPER)
    top = 0
    for image in images:
        sheet.paste(image, (0, top))
        top += image.height + 4
    return sheet


def draw_part(x: np.ndarray, grey: bool) -> Image.Image | None:
    """Draw a board, or stacked pictures as tiles, oldest first; None for other arrays."""
    if x.dtype == bool and x.ndim == 3:
        return fit(draw_board(x), 2 * TILE, 2 * TILE)
    if x.ndim == 3 and not channels_first(x[None]):
        x = x.transpose(2, 0, 1)
    if x.dtype != np.uint8 or x.ndim != 3 or min(x.shape[1:]) < 32:
        return None
    # EnvPool stacks pictures along the first axis; three planes make one colour picture.
    tiles = [x[i : i + 3].transpose(1, 2, 0) for i in range(0, len(x), 3)] if len(x) % 3 == 0 and not grey else list(x)
    columns = 1 if len(tiles) == 1 else 2
    rows = -(-len(tiles) // columns)
    sheet = Image.new("RGB", (columns * (TILE + 4) - 4, rows * (TILE + 4) - 4), PAPER)
    for i, tile in enumerate(tiles):
        image = Image.fromarray(np.ascontiguousarray(tile)).convert("RGB").resize((TILE, TILE))
        sheet.paste(image, (i % columns * (TILE + 4), i // columns * (TILE + 4)))
    return sheet


def draw_numbers(parts: dict[str, np.ndarray]) -> Image.Image:
    """Draw the numbers of an observation's parts [...], one to a line, of each part as many as of the others."""
    most, lines = max(1, MOST_NUMBERS // len(parts)), []
    for name, x in parts.items():
        lines += [f"{name} {number:9.4g}".strip() for number in np.ravel(x)[:most]]
        lines += [f"{name} … and {x.size - most} more".strip()] if x.size > most else []
    image = Image.new("RGB", (2 * TILE, LINE * len(lines)), PAPER)
    for i, line in enumerate(lines):
        ImageDraw.Draw(image).text((0, i * LINE), line, INK, ImageFont.load_default(14))
    return image


def bars_of(action: ActionSpec, chosen: np.ndarray) -> list[int]:
    """The indices of the bars that belong to an action, [] or [D]; none if it is real-valued."""
    starts = np.cumsum((0, *action.counts[:-1]))
    return [] if action.kind == "quantities" else (starts + chosen).tolist()


def figure(x: Any) -> str:
    """A number in at most nine characters."""
    return f"{x:.2f}" if abs(x) < 1000 or not np.isfinite(x) else f"{x:.2e}"


def draw_policy(names: tuple[str, ...], values: np.ndarray, chosen: Collection[int]) -> Image.Image:
    """Draw a bar per action, as long as its probability in values [A]; the chosen action in another colour.

    The scale runs from 0, or the lowest value if that is less, to 1, or the highest value if that is more: DQN's action
    values and real-valued actions are not probabilities.  Only the first `MOST_BARS` are drawn.
    """
    names, values = names[:MOST_BARS], values[:MOST_BARS]
    known = values[np.isfinite(values)]
    low, high = float(known.min(initial=0.0)), float(known.max(initial=1.0))
    font = ImageFont.load_default(13)
    # Widths must be the same in every frame: those of the longest name and of the longest possible number.
    numbers_end = math.ceil(max(map(font.getlength, names), default=0) + GAP + font.getlength("-8.88e+88"))
    bars = numbers_end + GAP // 2
    image = Image.new("RGB", (bars + BAR_LENGTH + 1, LINE * len(names)), PAPER)
    draw = ImageDraw.Draw(image)
    for i, (name, value) in enumerate(zip(names, values, strict=True)):
        top, colour = i * LINE, INK if i in chosen else DIM
        draw.text((0, top), name, colour, font)
        draw.text((numbers_end, top), figure(value), colour, font, anchor="ra")
        if not np.isfinite(value):  # the network has diverged, as the number shows
            continue
        length = round((float(value) - low) / (high - low) * BAR_LENGTH)
        draw.rectangle((bars, top + 2, bars + length, top + LINE - 5), CHOSEN if i in chosen else BAR)
    return image


def captioned(image: Image.Image, caption: str) -> Image.Image:
    """An image with a line of text above it."""
    whole = Image.new("RGB", (max(image.width, TILE), image.height + LINE + 4), PAPER)
    ImageDraw.Draw(whole).text((0, 0), caption, INK, ImageFont.load_default(16))
    whole.paste(image, (0, LINE + 4))
    return whole


def side_by_side(parts: list[Image.Image]) -> Image.Image:
    """Images in a row, with a border.  Width and height are even, as the codec requires."""
    width = sum(part.width + GAP for part in parts) + GAP
    height = max(part.height for part in parts) + 2 * GAP
    whole = Image.new("RGB", (width + width % 2, height + height % 2), PAPER)
    left = GAP
    for part in parts:
        whole.paste(part, (left, GAP))
        left += part.width + GAP
    return whole
