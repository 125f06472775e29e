"""Show and describe recipes."""
