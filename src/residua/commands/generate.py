"""The command `residua generate`."""

from typing import Annotated

from residua.commands.base import CheckpointChoice, expect_path
from residua.errors import Count, Natural, Range
from residua.lab.records.progress import say
from residua.lab.records.terminal import printable

COLDEST, HOTTEST = 1e-6, 1e6
"""The range of temperatures: below the range logits overflow, above it all tokens are equally probable."""
Temperature = Annotated[
    float,
    Range(
        f"a number from {COLDEST:g} to {HOTTEST:g} (--greedy takes the most probable token)",
        lambda x: COLDEST <= x <= HOTTEST,
    ),
]


def generate(
    run: str,
    *,
    prompt: str,
    max_new_tokens: Count | None = None,
    temperature: Temperature = 0.8,
    top_p: Annotated[float, Range("a number above 0, at most 1", lambda x: 0 < x <= 1)] = 0.95,
    top_k: Natural = 0,
    greedy: bool = False,
    seed: int = 0,
    checkpoint: CheckpointChoice | None = None,
) -> None:
    """Let the model of a run, or any Hugging Face model, write text.

    Examples:
        residua generate runs/ddl --prompt 'The function returns'
        residua generate models/smollm2-ihc --prompt '' --temperature 0.6 --seed 3

    Args:
        run (RUN|HF_DIR): folder of a run, or of a Hugging Face model
        prompt (TEXT): the text to continue; '' for a new document
        max_new_tokens: the largest number of new tokens (default: 200, or as many as fit into the context)
        temperature: lower is more predictable
        top_p: sample from this probability mass
        top_k: sample from the K most probable (default: all)
        greedy: always take the most probable token
        seed: seed of the sampling
        checkpoint (STEP|best): the newest by default; best has the lowest validation loss of the kept ones
    """
    expect_path(run)
    from residua.lab.evaluation.generate import complete
    from residua.lab.experiment import open_model

    opened = open_model(run, checkpoint)
    prompt_shown = False

    def show(piece: str) -> None:
        nonlocal prompt_shown
        # The prompt is printed with the first piece, so that bad input prints only its error.
        print(printable(piece if prompt_shown else prompt + piece), end="", flush=True)
        prompt_shown = True

    text = complete(
        opened.model,
        opened.tokenizer,
        prompt,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        greedy=greedy,
        seed=seed,
        on_text=show,
    )
    print("" if prompt_shown else prompt)
    tokens = len(opened.tokenizer.encode(prompt + text, add_special_tokens=False))
    if opened.window is not None and tokens > opened.window:
        say(
            f"note: the model was trained on windows of {opened.window} tokens; of these {tokens} tokens, later ones "
            "may be worse"
        )
