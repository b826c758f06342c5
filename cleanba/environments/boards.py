"""Boards as pictures."""

import numpy as np


def draw_board(board: np.ndarray) -> np.ndarray:
    """Draw planes of numbers, each in a colour that is brightest at its largest.  [H, W, C] -> [H, W, 3] uint8."""
    height, width, count = board.shape
    drawn = np.zeros((height, width, 3))
    for c in range(count):
        plane = np.abs(board[..., c].astype(float))
        colour = [0.55 + 0.45 * np.cos(2 * np.pi * (c / count + third / 3)) for third in range(3)]
        drawn = np.maximum(drawn, (plane / max(plane.max(), 1e-8))[..., None] * colour)
    return (drawn * 255).astype(np.uint8)
