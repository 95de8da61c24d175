"""What the commands share: options that list numbers."""

from __future__ import annotations

import pytest

from outrider.cli.common import numbers, parts
from outrider.types import OutriderError


def test_options_that_list_numbers() -> None:
    assert numbers(" 1, 4,", int, "--k") == (1, 4) and parts("a,, b") == ("a", "b")
    with pytest.raises(OutriderError, match="--k must be numbers separated by commas, got '1,x'"):
        numbers("1,x", int, "--k")
    with pytest.raises(OutriderError, match="--k is empty"):
        numbers(" ", int, "--k")
