"""Looks at runs, never changes them: run folders come in; a web page, a terminal screen or one HTML
file go out.
"""
