"""The command `residua export`."""

from residua.commands.base import CheckpointChoice, expect_path
from residua.lab.records.folder import new_folder
from residua.lab.records.terminal import one_line


def export(run: str, out: str, *, checkpoint: CheckpointChoice | None = None, remote_code: bool = False) -> None:
    """Write a run as a Hugging Face folder.

    Examples:
        residua export runs/ddl exported/ddl
        residua export runs/ddl exported/ddl --remote-code

    Args:
        run (RUN): folder of a run
        out (DIR): a new or empty folder
        checkpoint (STEP|best): the newest by default; best has the lowest validation loss of the kept ones
        remote_code: add the model's code, so that the folder loads without residua; for a converted model, residua must
            be installed, but need not be imported
    """
    expect_path(run, "a run folder")
    new_folder(out, "DIR")  # raises before torch is imported
    from residua.lab.export import export, loading

    folder = export(run, out, checkpoint=checkpoint, remote_code=remote_code)
    print(one_line(f"load it with: {'; '.join(loading(folder, remote_code=remote_code))}"))
