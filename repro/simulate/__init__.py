"""Virtual time: cost models, the executor that runs nothing, recorded beams, one serving run as one call."""
