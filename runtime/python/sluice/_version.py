"""The version of everything here: CMake reads it too."""

__version__ = "0.2.0"
