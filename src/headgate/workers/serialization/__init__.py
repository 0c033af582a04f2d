"""Python objects as bytes: arguments, results, functions, classes and context."""
