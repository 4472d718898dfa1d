"""The servicers of the public API on one server. Knows which there are; each has a file of its own in edge/."""

from common.rpc.server import RpcServer
from octavo.scheduler.v1 import (
    admin_service_pb2,
    admin_service_pb2_grpc,
    inference_service_pb2,
    inference_service_pb2_grpc,
    model_service_pb2,
    model_service_pb2_grpc,
)
from scheduler_svc.edge.admin import AdminServicer
from scheduler_svc.edge.inference import InferenceServicer
from scheduler_svc.edge.models import ModelServicer

INFERENCE = inference_service_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
MODELS = model_service_pb2.DESCRIPTOR.services_by_name["ModelService"].full_name
ADMIN = admin_service_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name
SERVICES = (INFERENCE, MODELS, ADMIN)


def add_servicers(server: RpcServer, inference: InferenceServicer, models: ModelServicer, admin: AdminServicer) -> None:
    """Registers everything of octavo.scheduler.v1."""
    inference_service_pb2_grpc.add_InferenceServiceServicer_to_server(inference, server.grpc)
    model_service_pb2_grpc.add_ModelServiceServicer_to_server(models, server.grpc)
    admin_service_pb2_grpc.add_AdminServiceServicer_to_server(admin, server.grpc)
