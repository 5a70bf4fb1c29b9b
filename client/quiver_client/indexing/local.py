"""Walks local folders in byte order of the relative path, and follows symbolic links but no cycles."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from urllib.parse import quote

from quiver.errors import BadRequest, Forbidden, NotFound, Unavailable
from quiver.manifest import SUFFIX, OriginObject
from quiver_client.indexing.errors import SourceChanged
from quiver_client.indexing.objects import Listing, ListingBuilder
from quiver_client.indexing.report import Notices

LEFT_OUT_SPECIAL: Final = "left out, neither a file nor a folder"
LEFT_OUT_DANGLING: Final = "left out, symbolic links to nothing"
LEFT_OUT_CIRCLE: Final = "left out, symbolic links to a folder above themselves"
LEFT_OUT_MANIFEST: Final = "left out, Quiver manifests"
LEFT_OUT_NAME: Final = "left out, names that cannot be asked for unmistakably"


def folder_url(folder: str) -> str:
    """Return the file URL of a folder. Raises ``BadRequest`` if its name is not UTF-8."""
    return "file://" + quote(_decoded(os.fsencode(os.path.abspath(folder))).rstrip("/") + "/")


def list_local(path: str, notices: Notices, output: Path) -> Listing:
    """List a file or a folder. Manifests, also the one about to be written, are no data."""
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        hint = "; a pattern is written {000..099}" if set("*?[") & set(path) else ""
        raise NotFound(f"there is no {path}; check the source's path{hint}") from None
    except OSError as error:
        raise _refused(path, error) from error
    builder = ListingBuilder()
    if stat.S_ISDIR(found.st_mode):
        for item in _walk(path, notices, output):
            builder.add(item)
        return builder.finish(folder_url(path))
    if not stat.S_ISREG(found.st_mode):
        raise BadRequest(f"{path} is neither a file nor a folder")
    builder.add(_object(os.path.basename(os.path.abspath(path)), found))
    return builder.finish(folder_url(os.path.dirname(os.path.abspath(path))), single=True)


def list_local_files(base: str, names: list[str]) -> Listing:
    """List files that are named individually, relative to ``base``."""
    builder = ListingBuilder()
    for name in names:
        path = os.path.join(base, name)
        try:
            found = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            raise NotFound(f"there is no {path}, which the source's pattern names") from None
        except OSError as error:
            raise _refused(path, error) from error
        if not stat.S_ISREG(found.st_mode):
            raise BadRequest(f"{path} is no file; a pattern names files")
        builder.add(_object(name, found))
    return builder.finish(folder_url(base))


def _walk(root: str, notices: Notices, output: Path) -> Iterator[OriginObject]:
    """Yield the files below ``root``, depth first with folders sorted as ``name/``: whole paths are in byte order."""
    top = os.fsencode(root)
    own = _identity(os.path.abspath(output))
    stack = [(b"", _identity(root), iter(_entries(top, b"", notices)))]
    while stack:
        below, _, names = stack[-1]
        name = next(names, None)
        if name is None:
            stack.pop()
            continue
        relative = below + name
        full = os.path.join(top, relative)
        try:
            found = os.stat(full)
        except FileNotFoundError:
            if not os.path.islink(full):
                raise SourceChanged(_shown(full), "vanished") from None
            notices.add(LEFT_OUT_DANGLING, _shown(relative))
            continue
        except OSError as error:
            raise _refused(_shown(full), error) from error
        identity = (found.st_dev, found.st_ino)
        if stat.S_ISDIR(found.st_mode):
            if any(identity == above for _, above, _ in stack):
                notices.add(LEFT_OUT_CIRCLE, _decoded(relative.rstrip(b"/")))
            else:
                stack.append((relative, identity, iter(_entries(full, relative, notices))))
        elif identity != own:
            path = _decoded(relative)
            if path.endswith(SUFFIX):
                notices.add(LEFT_OUT_MANIFEST, path)
            else:
                yield _object(path, found)


def _entries(folder: bytes, relative: bytes, notices: Notices) -> list[bytes]:
    """Return the names in a folder, folders with a slash, in the order of the walk."""
    names = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if _is_dir(entry):
                    names.append(entry.name + b"/")
                elif entry.is_symlink() or entry.is_file():
                    if _leads_to_file(entry, relative, notices):
                        names.append(entry.name)
                else:
                    notices.add(LEFT_OUT_SPECIAL, _shown(relative + entry.name))
    except (FileNotFoundError, NotADirectoryError):
        raise SourceChanged(_shown(folder), "vanished") from None
    except OSError as error:
        raise _refused(_shown(folder), error) from error
    names.sort()
    return names


def _is_dir(entry: os.DirEntry[bytes]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a symbolic link to itself
        return False


def _leads_to_file(entry: os.DirEntry[bytes], relative: bytes, notices: Notices) -> bool:
    if not entry.is_symlink():
        return True
    try:
        if entry.is_file():
            return True
        what = LEFT_OUT_SPECIAL if os.path.exists(entry.path) else LEFT_OUT_DANGLING
    except OSError:
        what = LEFT_OUT_DANGLING
    notices.add(what, _shown(relative + entry.name))
    return False


def _object(path: str, found: os.stat_result) -> OriginObject:
    return OriginObject(path=path, size=found.st_size, etag="", mtime_ns=found.st_mtime_ns)


def _identity(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _decoded(name: bytes) -> str:
    try:
        return name.decode()
    except UnicodeDecodeError:
        raise BadRequest(
            f"the file name {_shown(name)} is not UTF-8, so that a manifest cannot hold it; rename the file"
        ) from None


def _shown(name: bytes) -> str:
    return name.decode(errors="backslashreplace")


def _refused(path: str, error: OSError) -> Exception:
    if isinstance(error, PermissionError):
        return Forbidden(f"cannot read {path}: permission denied; let the user that runs this read it")
    return Unavailable(path, f"cannot be read: {error.strerror or error}")
