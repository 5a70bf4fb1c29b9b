"""``quiver info``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import numpy as np

from quiver.errors import Misconfigured
from quiver.manifest import Field, Manifest
from quiver.origin.base import split_url
from quiver.sizes import format_size
from quiver_client.cli.options import json_option, print_json
from quiver_client.identity import name_of


@click.command("info", epilog="Example: quiver info imagenet.quiver --json")
@click.argument("manifest", metavar="M.quiver")
@click.option("--shards", is_flag=True, help="Print a line '<digest> <bytes>' for each shard.")
@json_option
def command(manifest: str, *, shards: bool, as_json: bool) -> None:
    """Print what the manifest M.quiver contains."""
    scheme, path = split_url(manifest)
    if scheme != "file":
        raise Misconfigured(f"{manifest} is not on this machine; copy it here first")
    opened = Manifest.open(Path(path))
    if as_json:
        table = {"shard_table": [{"digest": name, "bytes": size} for name, size in _shards(opened)]} if shards else {}
        print_json({**describe(opened), **table})
    elif shards:
        for name, size in _shards(opened):
            click.echo(f"{name} {size}")
    else:
        click.echo("\n".join(_lines(opened)))


def describe(manifest: Manifest) -> dict[str, Any]:
    """Return what ``--json`` prints. ``bytes`` counts distinct samples."""
    return {
        "digest": str(manifest.digest),
        "name": name_of(manifest, manifest.path.name),
        "samples": len(manifest),
        "shards": manifest.shard_count,
        "bytes": manifest.total_bytes,
        "layout": manifest.header.layout,
        "fields": [_field(field) for field in manifest.header.fields],
        "origins": [manifest.header.base],
        "format": manifest.header.source,
        "objects": len(manifest.tables.object_sizes),
        "distinct": len(manifest.tables.offsets),
        "shard_bytes": manifest.header.shard_bytes,
    }


def _field(field: Field) -> dict[str, Any]:
    said: dict[str, Any] = {"name": field.name, "type": field.type}
    if field.classes:
        said["classes"] = list(field.classes)
    if field.is_array:
        said |= {"dtype": field.dtype, "shape": None if field.shape is None else list(field.shape)}
    return said


def _array(field: Field) -> str:
    """Return dtype and shape for people, ``int32[1024]``; with a star for a varying length."""
    if not field.is_array:
        return ""
    sizes = "*" if field.shape is None else ", ".join(map(str, field.shape))
    return f", {np.dtype(field.dtype).name}[{sizes}]"


def _shards(manifest: Manifest) -> list[tuple[str, int]]:
    sizes = manifest.tables.shard_sizes.tolist()
    return [(str(manifest.shard_digest(shard)), size) for shard, size in enumerate(sizes)]


def _lines(manifest: Manifest) -> list[str]:
    said = describe(manifest)
    equal = said["samples"] - said["distinct"]
    lines = [
        f"name     {said['name']}" + ("" if manifest.header.name else " (its file's)"),
        f"digest   {said['digest']}",
        f"samples  {said['samples']}" + (f" ({equal} equal to others)" if equal else ""),
        f"bytes    {said['bytes']} ({format_size(said['bytes'])})",
        f"shards   {said['shards']} of {format_size(said['shard_bytes'])} at most, {said['layout']}",
        f"origin   {manifest.header.base} ({said['objects']} objects, {said['format']})",
    ]
    for field in manifest.header.fields:
        classes = f", {len(field.classes)} classes: {', '.join(field.classes[:5])}" if field.classes else ""
        more = ", …" if len(field.classes) > 5 else ""
        lines.append(f"field    {field.name}: {field.type}{_array(field)}{classes}{more}")
    return lines
