"""The course: lessons that are shown, run, and turned into graded exercises."""
