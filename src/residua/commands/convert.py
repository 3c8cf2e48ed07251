"""The command `residua convert`."""

from typing import Literal

from residua.connections.names import canonical
from residua.lab.records.folder import new_folder
from residua.lab.records.terminal import one_line


def convert(
    model: str,
    *,
    connection: str,
    out: str,
    start: Literal["preserve", "fresh"] = "preserve",
    remote_code: bool = False,
) -> None:
    """Give a pretrained model another residual connection.

    Examples:
        residua convert models/smollm2 --connection ihc --out models/smollm2-ihc
        residua convert models/llama --connection ddl-tc --start fresh --out llama-ddl

    Args:
        model (MODEL): a folder with a Hugging Face model and its tokenizer
        connection (SCHEME): a scheme; residua schemes lists them
        out (DIR): a new or empty folder
        start: preserve: the model computes what it computed before; fresh: connections start as in a new model
        remote_code: let trust_remote_code=True open it, wherever residua is installed, without import residua
    """
    scheme, folder = canonical(connection), new_folder(out, "--out")  # both raise before torch is imported
    from residua.conversion import convert
    from residua.conversion.opening import read_model
    from residua.lab.export import add_code, converted_card, loading, model_folder

    opened, tokenizer = read_model(model)
    size = opened.num_parameters()
    convert(opened, scheme, start=start)
    growth = opened.num_parameters() - size
    with model_folder(folder) as temporary:
        opened.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        if remote_code:
            add_code(temporary)
        card = converted_card(model, scheme, name=folder.name, remote_code=remote_code)
        (temporary / "README.md").write_text(card, encoding="utf-8")
    print(f"{one_line(folder)}: {type(opened).__name__} with {scheme}, {growth:,} parameters more than {size:,}")
    print(one_line(f"load it with: {'; '.join(loading(folder, remote_code=remote_code))}"))
