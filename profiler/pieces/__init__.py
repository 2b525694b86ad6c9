"""Parts of a step that run a few rows at a time: a head together with its loss, and modules by themselves."""
