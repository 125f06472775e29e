"""Head masks: which KV heads keep the whole past (full) and which keep only sinks and a window
(streaming).

masks.py        HeadMasks, and the rules that select full heads by score, sparsity or chance
file.py         masks.tsv and masks.json, DuoAttention's files included
gates_file.py   the trained gates of a model, as head_gates.json and as masks
baselines.py    random draws and simple choices that masks are compared with
choice.py       what `--masks` and its options mean for one model; the variants an evaluation compares
plot.py         a picture of layers x heads

Everything here imports without torch.
"""
