"""Small tasks of lm-evaluation-harness on data of their own, as YAML and JSON lines: choices, whole texts, written answers."""

import json
from pathlib import Path

WORDS = ["cat", "dog", "hill", "Boxkämpfer", "a b", "x"]


def write_tasks(folder: Path) -> Path:
    """Write the tasks `choices`, `texts` and `written`, and return their folder."""
    folder.mkdir(parents=True)
    choices = [
        {"question": f"the {word} went to the ", "choices": WORDS[:3], "gold": index % 3}
        for index, word in enumerate(WORDS)
    ]
    # Longer than the model's context, exactly as long, one more, and short.
    texts = [
        {"text": "over the hills and far away, " * 9},
        {"text": "q" * 96},
        {"text": "r" * 97},
        {"text": "zwölf"},
    ]
    written = [
        {"question": word * (index * 9 + 1), "answer": "no"} for index, word in enumerate(WORDS)
    ]
    for name, rows in (("choices", choices), ("texts", texts), ("written", written)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "choices": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_target: gold
doc_to_choice: choices
num_fewshot: 1
fewshot_split: test
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
        "texts": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
""",
        "written": """
output_type: generate_until
doc_to_text: "Q: {{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["e", "</s>"], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match}]
""",
    }
    for name, text in settings.items():
        data = f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder / name}.jsonl}}}}\ntest_split: test\n"
        (folder / f"{name}.yaml").write_text(data + text.lstrip())
    return folder
