"""Clear errors for buckets that cannot be used, before any work."""

import contextlib
from collections.abc import Iterator

from qkvflow.errors import UserError, first_line, shortened
from qkvflow.places import Place

SCHEMES = {"gs": "gcsfs", "s3": "s3fs"}  # and who reads them; TensorStore knows no others
_CREDENTIALS = {
    "gs": "`gcloud auth application-default login`, or GOOGLE_APPLICATION_CREDENTIALS",
    "s3": "`aws configure`, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
}
_DENIED = ("credential", "forbidden", "denied", "anonymous", "unauthorized", "accesskey", "signature", "401", "403")


def require_bucket(place: Place) -> None:
    """Looks for the bucket of a place.

    Raises:
        UserError: it is not there, or may not be listed; or the URL is none of a bucket.
    """
    if place.scheme not in SCHEMES or not place.bucket:
        raise UserError(f"{shortened(str(place))} is neither a local folder nor a bucket, such as gs://bucket/runs")
    with bucket_errors_are_told(place):
        try:
            place.require_bucket()
        except FileNotFoundError:
            raise UserError(
                f"there is no bucket {place.scheme}://{place.bucket}. Create it, or correct its name"
            ) from None


@contextlib.contextmanager
def bucket_errors_are_told(place: Place) -> Iterator[None]:
    """Turns what a store and its library refuse into one `UserError`, for a place on this machine nothing."""
    try:
        yield
    except Exception as error:
        if not place.is_remote or isinstance(error, UserError):
            raise
        reason = first_line(error)
        if isinstance(error, ImportError):
            library = SCHEMES[place.scheme]
            raise UserError(
                f"{place} needs the package {library}, which is not installed: pip install {library}"
            ) from None
        if isinstance(error, PermissionError) or any(word in f"{type(error)} {error}".lower() for word in _DENIED):
            raise UserError(
                f"the bucket of {place} refuses this user: {shortened(reason)}. Give credentials with permission to"
                f" read, list and write it: {_CREDENTIALS[place.scheme]}"
            ) from error
        if _is_of_store(error):
            raise UserError(f"{place} cannot be used: {shortened(reason)}") from error
        raise


def _is_of_store(error: Exception) -> bool:
    library = type(error).__module__.partition(".")[0]
    if isinstance(error, OSError):
        return error.filename is None  # else it is of a file on this machine
    return library in ("aiobotocore", "aiohttp", "botocore", "gcsfs", "google")
