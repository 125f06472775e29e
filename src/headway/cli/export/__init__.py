"""Write models in the form of other tools."""
