"""Are the files of a cache those that were written.

Owns the checks of shard files against their records, quick ones and of every byte, and the words for what is wrong.
Does not own the record files' own digests (`format`), nor what is done about a fault.
"""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open

from qat_lora.errors import CacheError
from qat_lora.files import sha256_file
from qat_lora.kd.format import SHARD_KEY, CacheManifest, ShardRecord
from qat_lora.kd.parts import load_manifest, records_in, united

REBUILD = "restore the file, or delete it and run the build command again to write it anew"


def shard_fault(directory: Path, manifest: CacheManifest, shard: ShardRecord) -> str | None:
    """What is wrong with a recorded shard, as far as its size and header tell; None where nothing is."""
    path = directory / shard.file
    if not path.is_file():
        return f"The KD cache lacks its shard {str(path)!r}; restore the file or run the build command again."
    size = path.stat().st_size
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


def check_shards(directory: Path, manifest: CacheManifest) -> None:
    """Raise CacheError at the first recorded shard that is missing, cut short or foreign."""
    for shard in manifest.shards:
        if fault := shard_fault(directory, manifest, shard):
            raise CacheError(fault)


def shard_tag_of(path: Path) -> str | None:
    """What a shard file says of itself; None where it says nothing, CacheError where it is no safetensors file."""
    try:
        with safe_open(path, framework="np") as file:
            return (file.metadata() or {}).get(SHARD_KEY)
    except (SafetensorError, OSError) as error:
        raise CacheError(f"{str(path)!r} is no sound safetensors file ({error}); {REBUILD}.") from None


def verify(directory: Path | str) -> CacheManifest:
    """Read every byte of a cache, finished or not, and return what its records say together.

    Raises CacheError where a byte of a shard or of a record is not the one that was written, naming all shards that
    differ.
    """
    directory = Path(directory)
    load_manifest(directory)  # which has the words for a folder that is no cache
    manifest = united(records_in(directory))  # not the main record alone: a flip in another counts, too
    quick = [shard_fault(directory, manifest, shard) for shard in manifest.shards]
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


def damaged(path: Path, recorded: str, found: str) -> str:
    """Say that a shard's digest is not the recorded one."""
    digests = f"sha256 {found[:12]}.. instead of the recorded {recorded[:12]}.."
    return f"{str(path)!r} is damaged: {digests}; {REBUILD}."


def _content_fault(directory: Path, shard: ShardRecord) -> str | None:
    path = directory / shard.file
    found = sha256_file(path)
    return None if found == shard.sha256 else damaged(path, shard.sha256, found)
