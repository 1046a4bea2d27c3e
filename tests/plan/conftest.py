"""What tests of plans share."""

import pytest
from small_llama import LLAMA


@pytest.fixture
def llama(tiny):
    """``llama(fields)``: the run of it with some fields changed."""
    return lambda fields=None: tiny(LLAMA | (fields or {}))
