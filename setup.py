"""The build step that pyproject.toml cannot express: the C++ helpers go into the wheel."""

from __future__ import annotations

import shutil
import sys
import types
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent

# gptpar/__init__.py may need what an isolated build does not have: import from the folder without running it.
package = types.ModuleType("gptpar")
package.__path__ = [str(ROOT / "gptpar")]
sys.modules["gptpar"] = package
sys.path.insert(0, str(ROOT))
from gptpar.errors import NativeBuildError  # noqa: E402
from gptpar.system import native  # noqa: E402


class BuildWithHelpers(build_py):
    """Editable installs read the checkout's csrc/ and build on first use, so they need nothing here."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        sources, libraries = (Path(self.build_lib, "gptpar", folder) for folder in ("_csrc", "_lib"))
        for folder in (sources, libraries):
            shutil.rmtree(folder, ignore_errors=True)  # an earlier build's, of other sources
        shutil.copytree(ROOT / "csrc", sources)
        libraries.mkdir()
        for source in sorted(sources.glob("*.cpp")):
            try:
                native.compile_library(native.find_compiler(), source, libraries, native.library_key(source))
            except NativeBuildError as error:
                self.warn(f"{source.name} is left to be built on first use: {error}")


class PlatformWheel(bdist_wheel):
    """The helpers have a plain C ABI: one wheel serves every Python version of a platform."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


class BinaryDistribution(Distribution):
    """Tells setuptools that the wheel is not for every platform."""

    def has_ext_modules(self) -> bool:
        return True


setup(cmdclass={"build_py": BuildWithHelpers, "bdist_wheel": PlatformWheel}, distclass=BinaryDistribution)
