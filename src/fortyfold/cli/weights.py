"""`fortyfold weights …`"""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Weights from elsewhere.", no_args_is_help=True)


@app.callback()
def _weights() -> None:
    """Weights from elsewhere."""


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(metavar="IN.pth", help="What torch.save wrote.")],
    target: Annotated[Path, typer.Argument(metavar="OUT.safetensors", dir_okay=False, help="What to write.")],
    ema: Annotated[bool, typer.Option("--ema", help="Take the moving average (state_dict_ema, model_ema).")] = False,
    key: Annotated[str | None, typer.Option(help="Take this entry of the file.")] = None,
) -> None:
    """Convert weights for model.pretrained. Nothing in the file is run: one that holds more than tensors is refused."""
    from fortyfold.data.prepare.work import in_words
    from fortyfold.models.weights import convert as convert_weights

    made = convert_weights(source, target, ema=ema, key=key)
    origin = f"{made.key} of {source}" if made.key else source
    print(f"wrote {target}: {made.num_tensors} tensors, {in_words(made.num_bytes)}, from {origin}")
