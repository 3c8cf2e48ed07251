"""The command `residua generate`."""

from residua.commands.base import Arguments, Parser, add_checkpoint, number, opens_model, whole
from residua.errors import InputError, require

HELP = "let the model of a run, or any of transformers, write text"
EXAMPLES = """\
residua generate runs/ddl --prompt 'The function returns'
residua generate models/smollm2-ihc --prompt '' --temperature 0.6 --seed 3"""
COLDEST, HOTTEST = 1e-6, 1e6
"""Outside this range logits overflow, or all tokens are equally probable."""


def add_arguments(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN|HF_DIR", help="folder of a run, or of a model of transformers")
    add_checkpoint(parser)
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="the text to continue; '' for a new document")
    parser.add_argument("--max-new-tokens", type=whole(), metavar="N", help="(default: 200, or what fits the context)")
    parser.add_argument("--temperature", type=float, default=0.8, metavar="X", help="lower is more predictable (0.8)")
    parser.add_argument(
        "--top-p", type=number, default=0.95, metavar="P", help="sample from this probability mass (0.95)"
    )
    parser.add_argument(
        "--top-k", type=whole(), default=0, metavar="K", help="sample from the K most probable (0: all)"
    )
    parser.add_argument("--seed", type=whole(), default=0, metavar="N", help="of the sampling (0)")
    parser.add_argument("--greedy", action="store_true", help="always the most probable token")


def run(arguments: Arguments) -> None:
    if not arguments.greedy:
        if not arguments.temperature > 0:
            raise InputError(
                f"--temperature must be a number above 0, got {arguments.temperature:g}; for the most probable text "
                "use --greedy"
            )
        warm = COLDEST <= arguments.temperature <= HOTTEST
        require(warm, "--temperature", f"a number from {COLDEST:g} to {HOTTEST:g}", arguments.temperature)
    from residua.lab.evaluation.generate import complete
    from residua.lab.experiment import open_model, open_run

    if opens_model(arguments.run, arguments.checkpoint):
        model, tokenizer = open_model(arguments.run)
    else:
        opened = open_run(arguments.run, arguments.checkpoint)
        model, tokenizer = opened.model, opened.tokenizer
    prompt_shown = False

    def show(piece: str) -> None:
        nonlocal prompt_shown
        # The prompt waits for the first piece, so that bad input prints only its error.
        text = piece if prompt_shown else arguments.prompt + piece
        print(text, end="", flush=True)
        prompt_shown = True

    complete(
        model,
        tokenizer,
        arguments.prompt,
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        greedy=arguments.greedy,
        seed=arguments.seed,
        on_text=show,
    )
    print("" if prompt_shown else arguments.prompt)
