"""How the shipped bundles of real models are made: data, seeds and stages, as programs. `python -m recipes.qwen --help`."""
