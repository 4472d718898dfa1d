"""Share of teacher-forced positions at which weight-only int8 has the same most likely token as fp32, asked through gRPC."""

from concurrent.futures import ThreadPoolExecutor

from bench.figures import Figures
from octavo.scheduler.v1 import inference_service_pb2 as pb
from octavo.scheduler.v1 import inference_service_pb2_grpc
from tests.e2e.stack import Stack, collect, greedy_request

TEXT = (
    "The old mill stands at the bend of the river, where the water runs fast over stones. In 1874 a miller named Thomas bought "
    "it for 320 pounds and repaired the wheel with oak from the forest above the village. For thirty years farmers brought "
    "their grain to him every autumn, and he ground it into flour while they waited, smoked and talked about the weather. When "
    "the railway came, larger mills in the city could work for less, and one after the other the farmers stayed away. Thomas "
    "sold bread instead. His daughter Anna kept the books, and from them we know what a loaf cost, how many people bought one "
    "on a Saturday, and how often the river froze.\n\n"
    "A computer stores numbers as patterns of bits. Eight bits can hold 256 different values, sixteen bits 65,536. If a program "
    "needs fractions, it splits the bits into three parts: a sign, an exponent and a significand. The exponent says how large "
    "the number is, and the significand says which number of that size it is. Most fractions cannot be written exactly in this "
    "way, so every calculation rounds its result to the nearest number that can. The errors are small, but they add up, and a "
    "careful programmer asks in which order numbers should be added.\n\n"
    "To plant a tree, dig a hole twice as wide as its roots and just as deep. Loosen the soil at the bottom, set the tree "
    "upright, and fill the hole with the earth that came out of it. Water it well, at least 10 litres, and again every few days "
    "during the first summer."
)


def most_likely_tokens(stack: Stack) -> list[int]:
    """The greedy token after every prefix of TEXT; neighbours share their cached prefix."""
    with stack.channel() as channel, ThreadPoolExecutor(16) as pool:
        stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
        ids = list(stub.Tokenize(pb.TokenizeRequest(text=TEXT), timeout=30).token_ids)
        collect(stub, greedy_request(ids, 1))
        answers = pool.map(lambda length: collect(stub, greedy_request(ids[:length], 1)), range(1, len(ids) + 1))
        return [answer.token_ids[0][0] for answer in answers]


def add_agreement(figures: Figures, exact: list[int], quantized: list[int]) -> None:
    """The share of equal tokens."""
    equal = sum(a == b for a, b in zip(exact, quantized, strict=True))
    figures.add("int8", f"top-1 equal to fp32, {len(exact)} tokens", 100 * equal / len(exact), "%", "octavo int8")
