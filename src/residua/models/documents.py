"""Packed documents: what a model is told so that it reads each document of a row by itself."""

from typing import Any

from torch import Tensor

from residua.connections.memory import positions_in


def documents_apart(input_ids: Tensor, end_of_text: int | None) -> dict[str, Any]:
    """Return the arguments with which a model reads each document of a row by itself; none if end_of_text is None.

    input_ids: int64 (batch, seq). They are the positions (batch, seq), which start again at every `end_of_text`: that
    token begins the document after it, so the first label of a document is predicted from it alone.
    """
    if end_of_text is None:
        return {}
    return {"position_ids": positions_in((input_ids == end_of_text).cumsum(1)), "use_cache": False}
