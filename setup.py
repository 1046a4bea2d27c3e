"""Finds the packages: pyproject.toml can find them, or name the folder that they are found in, but not do both."""

from setuptools import find_packages, setup

setup(
    package_dir={"birthmark": "."},
    packages=["birthmark", *(f"birthmark.{name}" for name in find_packages())],
)
