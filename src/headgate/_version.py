"""The version of headgate, in the one place that the build reads too."""

__version__ = "0.1.0"
