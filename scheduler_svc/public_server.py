"""The public API on one gRPC server, for whichever engine it gets. Used by the engine's process and by edge processes alike."""

from common.clock import Clock
from common.model_spec import public_name
from common.rpc.address import Address
from common.rpc.server import RpcServer
from scheduler_svc.edge.admin import AdminServicer
from scheduler_svc.edge.callers import Callers
from scheduler_svc.edge.engine import Administration, EdgeEngine
from scheduler_svc.edge.inference import InferenceServicer
from scheduler_svc.edge.models import ModelServicer
from scheduler_svc.edge.pacing import Pacing
from scheduler_svc.edge.preparation import Preparation
from scheduler_svc.service import ADMIN, SERVICES, add_servicers
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.tenants_file import read_tenants
from scheduler_svc.text.model_text import ModelText


def public_server(
    settings: SchedulerSettings,
    text: ModelText,
    engine: EdgeEngine,
    administration: Administration,
    clock: Clock,
    pacing: Pacing,
    *,
    shares_port: bool = False,
) -> RpcServer:
    """A server that is ready to be started.

    Args:
        settings: listen is its address.
        text: of the model.
        engine: what requests go to.
        administration: what operators' calls go to.
        clock: the engine's.
        pacing: of streams.
        shares_port: other processes of this server listen on the address too.

    Raises:
        StartupError: the file of tenants cannot be used.
    """
    tenants = read_tenants(settings.tenants)
    address = Address.parse(settings.listen)
    server = RpcServer(
        address, settings.security(tenants.tenant_of_token), SERVICES,
        max_message_bytes=settings.max_message_bytes, admin_services=(ADMIN,), shares_port=shares_port,
    )  # fmt: skip
    preparation = Preparation(text, clock, settings.cache_salt.get_secret_value(), tenants.tenants)
    model_name = public_name(settings.model_name) if settings.model_name else ""
    inference = InferenceServicer(engine, text, preparation, pacing, Callers(tenants.tenant_of_token))
    add_servicers(server, inference, ModelServicer(engine, text, model_name), AdminServicer(administration))
    return server
