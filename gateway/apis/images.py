"""From the body of an image or video generation to a GenerateRequest: parse, model, parameters, request.

Pure but for random numbers. Options that the client leaves open take the pipeline's defaults.
"""

from collections.abc import Callable, Mapping

from penstock.gateway.apis.chat.prepare import PreparedRequest
from penstock.gateway.apis.images_requests import parse_image, parse_video
from penstock.gateway.apis.parameters import resolve_parameters
from penstock.gateway.base.common import random_seed, resolve_deadline_s, resolve_priority, resolve_seed
from penstock.gateway.base.errors import invalid
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.fleet import Diffuser
from penstock.schemas.requests import GenerateRequest, Stop

IMAGE = "image"  # values of GenerateRequest.endpoint
VIDEO = "video"
PATHS = {IMAGE: "/v1/images/generations", VIDEO: "/v1/videos/generations"}


def prepare_images(
    endpoint: str,
    data: bytes,
    models: Mapping[str, Diffuser],
    *,
    gateway: str,
    default_deadline_s: float,
    now_ns: int,
    request_id: str,
    no_store: bool = False,
    seed: Callable[[], int] = random_seed,
) -> PreparedRequest:
    """
    Args:
        no_store: as if the body asked for it.
        endpoint: "image" or "video".
        models: diffusion models of the workers, by name.
    Raises:
        ServingError: the body cannot be served; names the field and the limit.
    """
    body = parse_image(data) if endpoint == IMAGE else parse_video(data)
    name, model = _find_model(body.model, endpoint, models)
    diffusion = resolve_parameters(body, model, resolve_seed(body, seed))
    request = GenerateRequest(
        id=request_id,
        model=name,
        gateway=gateway,
        prompt=b"",
        stop=Stop(max_tokens=diffusion.steps * diffusion.images),
        created_ns=now_ns,
        deadline_ns=now_ns + int(resolve_deadline_s(body, default_deadline_s) * 1e9),
        priority=resolve_priority(body.priority, body.service_tier),
        user=body.user or "",
        worker=body.worker or "",
        endpoint=endpoint,
        diffusion=diffusion,
        no_store=no_store or bool(body.no_store),
    )
    return PreparedRequest(request, 0, bool(body.stream), False)


def _find_model(name: str | None, kind: str, models: Mapping[str, Diffuser]) -> tuple[str, Diffuser]:
    """The model and its name. ``name``: None or "": the only one of this kind that there is."""
    of_kind = [(other, each) for other, each in models.items() if each.kind == kind]
    if not name and of_kind and all(each == of_kind[0][1] for _, each in of_kind):
        name = of_kind[0][0]
    name = name or ""
    model = models.get(name)
    if model is None:
        served = ", ".join(repr(other) for other, each in models.items() if each.kind == kind) or "none"
        raise ServingError(
            Code.model_not_found,
            f"no model {name[:200]!r} generates {kind}s here; models that do: {served}",
            param="model",
        )
    if model.kind != kind:
        raise invalid("model", f"model {name[:200]!r} generates {model.kind}s; use POST {PATHS[model.kind]}")
    return name, model
