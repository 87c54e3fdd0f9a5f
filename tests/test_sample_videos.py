"""run_folder/sample_videos.py: a video's strip of frames, and its MP4 file, read again."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from composer.loggers import LoggerDestination
from PIL import Image

from callbacks.sample_grid import write_grid
from run_folder import sample_videos


def video(num_frames: int) -> torch.Tensor:
    """A bar that moves over grey, (3, F, 32, 48) uint8."""
    made = torch.full((3, num_frames, 32, 48), 90, dtype=torch.uint8)
    for number in range(num_frames):
        made[0, number, :, 4 * number : 4 * number + 8] = 230
    return made


def test_a_strip_has_the_first_and_the_last_frame_and_at_most_eight():
    made = video(11)
    strip = sample_videos.strip_of(made)
    assert strip.shape == (3, 32, 8 * 48 + 7)
    assert torch.equal(strip[..., :48], made[:, 0]) and torch.equal(strip[..., -48:], made[:, 10])
    assert torch.equal(sample_videos.strip_of(made[:, :1]), made[:, 0])


def test_a_grid_of_videos_has_a_strip_and_a_file_of_each(tmp_path):
    """Only a logger that has videos gets them: Composer's own, and a user's, would fail on a path."""
    logged = []
    destinations = [LoggerDestination(), SimpleNamespace(log_video=lambda *video: logged.append(video))]
    logger = SimpleNamespace(destinations=destinations)
    logger.log_images = lambda image, **more: logged.append((more["name"], image))
    samples = [("a bar", video(9)), ("another bar", video(9))]
    write_grid(tmp_path, 16, 2, samples, logger, lambda shown: [image.shape for _, image in shown], 8.0)
    gif = tmp_path / "samples/im000000000016.gif"
    assert logged == [(gif, "samples/videos", 2), ("samples/grid", [(3, 32, 8 * 48 + 7)] * 2)]
    names = {path.relative_to(tmp_path / "samples").as_posix() for path in tmp_path.rglob("*.*")}
    of_grid = {"captions.txt", "im000000000016.png", "im000000000016.gif"}
    assert names == {*of_grid, "im000000000016/00.mp4", "im000000000016/01.mp4"}
    with Image.open(gif) as film:
        assert film.n_frames == 9 and film.size == (2 * 48 + 2, 32) and film.info["loop"] == 0
