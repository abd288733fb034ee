"""Are the files of a cache those that were written.

Owns the checks of shard files against their records, quick ones and of every byte, and the words for what is wrong.
Does not own the record files' own digests (`format`), nor what is done about a fault.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from qat_lora.cache.format import SHARD_KEY, CacheManifest, ShardRecord
from qat_lora.cache.parts import load_manifest, records_in, united
from qat_lora.cache.tensor_file import TensorFile
from qat_lora.errors import CacheError
from qat_lora.files import file_sizes, sha256_file
from qat_lora.remote import Location, location

REBUILD = "restore the file, or delete it and run the build command again to write it anew"


def shard_fault(
    directory: Location, manifest: CacheManifest, shard: ShardRecord, sizes: Mapping[str, int]
) -> str | None:
    """What is wrong with a recorded shard, as far as its size and header tell; None where nothing is.

    `sizes` are those of the folder's files.
    """
    path = directory / shard.file
    size = sizes.get(shard.file)
    if size is None:
        return f"The KD cache lacks its shard {str(path)!r}; restore the file or run the build command again."
    if size != shard.bytes:
        return f"{str(path)!r} has {size} bytes instead of {shard.bytes} (cut short?); {REBUILD}."
    try:
        tag = shard_tag_of(path)
    except CacheError as error:
        return str(error)
    if tag != manifest.shard_tag(shard.index):
        return (
            f"{str(path)!r} belongs to another KD cache or another place in this one, or the folder's manifest is of "
            f"another build; {REBUILD}."
        )
    return None


def check_shards(directory: Location, manifest: CacheManifest) -> None:
    """Raise CacheError at the first recorded shard that is missing, cut short or foreign."""
    sizes = file_sizes(directory)
    for shard in manifest.shards:
        if fault := shard_fault(directory, manifest, shard, sizes):
            raise CacheError(fault)


def shard_tag_of(path: Location) -> str | None:
    """What a shard file says of itself; None where it says nothing, CacheError where it is no safetensors file."""
    try:
        with TensorFile(path) as file:
            return file.metadata.get(SHARD_KEY)
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise CacheError(f"{str(path)!r} is no sound safetensors file ({error}); {REBUILD}.") from None


def verify(directory: Location | str) -> CacheManifest:
    """Read every byte of a cache, finished or not, and return what its records say together.

    Raises CacheError where a byte of a shard or of a record is not the one that was written, naming all shards that
    differ.
    """
    directory = location(directory)
    load_manifest(directory)  # which has the words for a folder that is no cache
    manifest = united(records_in(directory))  # not the main record alone: a flip in another counts, too
    sizes = file_sizes(directory)
    quick = [shard_fault(directory, manifest, shard, sizes) for shard in manifest.shards]
    faults = [fault or _content_fault(directory, shard) for fault, shard in zip(quick, manifest.shards, strict=True)]
    if len(faults) > 1 and all(faults) and not any(quick):
        raise CacheError(
            f"None of the {len(faults)} shards of {str(directory)!r} is the recorded one, though each is a sound file "
            "of this cache: the manifest is of another build; restore the one that was written with these shards, or "
            "build the cache again elsewhere."
        )
    if any(faults):
        raise CacheError(" ".join(fault for fault in faults if fault))
    return manifest


def read_recorded(path: Path, sha256: str) -> bytes:
    """The content of a shard file; CacheError where it cannot be read, or is not what was recorded."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CacheError(f"{str(path)!r} cannot be read ({error.strerror}); restore the file.") from None
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise CacheError(damaged(path, sha256, found))
    return data


def damaged(path: Location, recorded: str, found: str) -> str:
    """Say that a shard's digest is not the recorded one."""
    digests = f"sha256 {found[:12]}.. instead of the recorded {recorded[:12]}.."
    return f"{str(path)!r} is damaged: {digests}; {REBUILD}."


def _content_fault(directory: Location, shard: ShardRecord) -> str | None:
    path = directory / shard.file
    found = sha256_file(path)
    return None if found == shard.sha256 else damaged(path, shard.sha256, found)
