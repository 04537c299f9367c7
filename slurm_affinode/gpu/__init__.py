"""GPUs as a node sees them: what they do, which job uses them, and how that is passed on."""
