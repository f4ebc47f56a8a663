"""Finds the reader's answers; what is not answered yet is skipped."""

import importlib

import pytest


@pytest.fixture
def answer(request):
    """The function in answers.py that the test's docstring names in its first word."""
    name = request.function.__doc__.split()[0]
    try:
        return getattr(importlib.import_module("answers"), name)
    except (ModuleNotFoundError, AttributeError):
        pytest.skip(f"exercises/answers.py has no {name} yet")
