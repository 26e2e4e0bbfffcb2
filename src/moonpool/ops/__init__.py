"""Running a pool: options, health and metrics over HTTP, a look at all of it, emptying a messenger."""
