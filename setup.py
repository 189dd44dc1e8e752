"""Builds the native JPEG decoder where a compiler and libjpeg-turbo's headers are; elsewhere Pillow serves."""

from pathlib import Path

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "fortyfold.data._native",
            sources=sorted(str(path) for path in Path("native").glob("*.c")),
            depends=sorted(str(path) for path in Path("native").glob("*.h")),
            libraries=["jpeg"],
            define_macros=[("Py_LIMITED_API", "0x030B0000"), ("_GNU_SOURCE", None)],
            extra_compile_args=["-O3", "-std=c11", "-Wall", "-Wextra", "-pthread"],
            extra_link_args=["-pthread"],
            py_limited_api=True,
            optional=True,
        )
    ],
)
