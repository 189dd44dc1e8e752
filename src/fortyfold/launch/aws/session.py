"""The way to EC2 and S3. Every call goes through `Client`, so that whatever goes wrong there is one line."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fortyfold.spec.aws_site import AwsSite
from fortyfold.spec.errors import UserError

_HINTS = {
    "RequestExpired": "the credentials have expired; log in again (aws sso login), or see to this machine's clock",
    "ExpiredToken": "the credentials have expired; log in again (aws sso login)",
    "ExpiredTokenException": "the credentials have expired; log in again (aws sso login)",
    "AuthFailure": "the credentials are not valid; see profile in the site",
    "InvalidClientTokenId": "the credentials are not valid; see profile in the site",
    "UnauthorizedOperation": "the account's administrator has to allow it",
    "VcpuLimitExceeded": "ask AWS for a higher quota of this kind of instance",
    "MaxSpotInstanceCountExceeded": "ask AWS for a higher quota of spot instances",
    "InvalidKeyPair.NotFound": "see key in the site",
    "InvalidParameterValue": "see the site",
}
_MAY_NOT = "instance_profile has to allow ListBucket, GetObject, PutObject and DeleteObject there"
_STORE_HINTS = {"NoSuchBucket": "see run_root in the site", "AccessDenied": _MAY_NOT, "403": _MAY_NOT}
_NO_CREDENTIALS = "AWS: there are no credentials; `aws configure`, or name a profile in the site"
_NO_ROLE = "AWS: the instance has no credentials; its instance_profile has no role"


class AwsError(UserError):
    """AWS refused a request."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class Client:
    """A client of boto3, called by the name of the operation. Its errors are UserErrors of one line."""

    def __init__(self, client: Any, hints: Mapping[str, str] = _HINTS, no_credentials: str = _NO_CREDENTIALS) -> None:
        self._client, self._words = client, (hints, no_credentials)

    def __call__(self, operation: str, **request: Any) -> dict[str, Any]:
        with _in_one_line(operation, *self._words):
            answer: dict[str, Any] = getattr(self._client, operation)(**request)
        return answer

    def list(self, operation: str, key: str, **request: Any) -> list[dict[str, Any]]:
        """All pages of a describe operation."""
        with _in_one_line(operation, *self._words):
            pages = self._client.get_paginator(operation).paginate(**request)
            return [item for page in pages for item in page.get(key, ())]

    def wait(self, condition: str, **request: Any) -> None:
        """Until one of botocore's waiters is content."""
        with _in_one_line(condition, *self._words):
            self._client.get_waiter(condition).wait(**request)


def connect(site: AwsSite) -> Client:
    """To EC2, from the machine that commands. Nothing is asked of AWS yet."""
    return Client(_make_client("ec2", site.region, site.profile))


def connect_from_instance(region: str) -> Client:
    """To S3, with what the instance itself is allowed."""
    return Client(_make_client("s3", region, None), _STORE_HINTS, _NO_ROLE)


def _make_client(service: str, region: str, profile: str | None) -> Any:
    try:
        import boto3
        from botocore.config import Config
    except ImportError:
        raise UserError("a site of kind aws needs boto3; pip install 'fortyfold[aws]'") from None
    patience = Config(retries={"mode": "standard", "max_attempts": 5}, connect_timeout=10, read_timeout=60)
    with _in_one_line("the credentials"):
        return boto3.Session(profile_name=profile, region_name=region).client(service, config=patience)


@contextmanager
def _in_one_line(
    operation: str, hints: Mapping[str, str] = _HINTS, no_credentials: str = _NO_CREDENTIALS
) -> Iterator[None]:
    from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError
    from s3transfer.exceptions import RetriesExceededError

    try:
        yield
    except ClientError as error:
        found = error.response.get("Error", {})
        code, message = str(found.get("Code", "")), str(found.get("Message", ""))
        raise AwsError(code, _line(operation, code, message, hints.get(code))) from None
    except NoCredentialsError:
        raise UserError(no_credentials) from None
    except (BotoCoreError, RetriesExceededError) as error:
        raise UserError(f"AWS: {operation}: {' '.join(str(error).split())}") from None


def _line(operation: str, code: str, message: str, hint: str | None) -> str:
    """What AWS says (without the encoded part that only an administrator can read), and what to do about it."""
    said = " ".join(message.partition("Encoded authorization failure")[0].split()).rstrip(".")
    return f"AWS: {operation}: {code}: {said}{f'; {hint}' if hint else ''}"
