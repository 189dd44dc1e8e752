"""Builds the native JPEG decoder where a compiler and libjpeg-turbo's headers are; elsewhere Pillow serves."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "fortyfold.data._native",
            sources=["native/module.c", "native/jpeg.c", "native/resample.c"],
            depends=["native/jpeg.h", "native/resample.h"],
            libraries=["jpeg"],
            define_macros=[("Py_LIMITED_API", "0x030B0000"), ("_GNU_SOURCE", None)],
            extra_compile_args=["-O3", "-std=c11", "-Wall", "-Wextra", "-pthread"],
            extra_link_args=["-pthread"],
            py_limited_api=True,
            optional=True,
        )
    ],
)
