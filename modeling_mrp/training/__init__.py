"""Training of MRP heads: command, data, trainer, adapters and the head-only artefact. Not needed to load a model."""
