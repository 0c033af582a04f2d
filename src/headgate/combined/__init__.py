"""The three pools together: a TaskPool with `resources=` and `workers=`."""
