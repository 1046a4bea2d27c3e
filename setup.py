"""Builder that finds the packages: pyproject.toml can find them, or name the folder that they are found in, but not do
both.
"""

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py


class BuildPackages(build_py):
    """Builder that leaves out this file, which stands among the package's own modules."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        """List the modules of a package: (package, module, file) for each."""
        found = super().find_package_modules(package, package_dir)
        return [module for module in found if module[:2] != ("birthmark", "setup")]


setup(
    package_dir={"birthmark": "."},
    packages=[
        "birthmark",
        *(f"birthmark.{name}" for name in find_packages(exclude=["build*", "tests*", "benchmarks*", "research*"])),
    ],
    cmdclass={"build_py": BuildPackages},
)
