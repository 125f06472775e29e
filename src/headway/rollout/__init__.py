"""Rollouts: prompts are answered by the model that trains, and the answers become its rows.

    prompts.py      records -> prompts that the loader orders, splits and counts
    config.py       the settings
    sampler.py      a copy of the weights in the inference engine, overwritten after updates
    journal.py      what was sampled and what it earned, on the disk
    rows.py         answers with advantages -> the microbatches of a step

`train/rollouts.py` joins these to a source of steps.
"""
