"""A worker without a model, for tests of the front: python -m tests.integration.executor_svc.fake_worker <pipe> <lines>.

It answers each plan with the number of its session as the token, and does something special for a few step ids.
"""

import os
import signal
import socket
import sys

from common.frames import Frame, FrameKind, FramePipe
from executor_svc.inbox import Inbox
from executor_svc.settings import ExecutorSettings
from octavo.executor.v1 import executor_service_pb2 as pb

NONSENSE_STEP = 666
FATAL_STEP = 999
MUTE_STEP = 555
INFO = pb.ExecutorInfo(executor_id="fake", model="models/fake", num_blocks=8, block_size=16)


def main(pipe_fd: int, lines_fd: int) -> None:
    pipe = FramePipe(socket.socket(fileno=pipe_fd))
    inbox = Inbox(pipe, socket.socket(fileno=lines_fd))
    is_ready = False
    while (frames := inbox.receive(wait=True)) is not None:
        for frame in frames:
            match frame.kind:
                case FrameKind.SETTINGS:
                    model = ExecutorSettings.from_json(frame.payload).model
                    if model == "refused":
                        pipe.send(Frame(FrameKind.REFUSED, payload=b"model refused: it is a fake"))
                        sys.exit(1)
                    is_ready = model == "ready"
                    if is_ready:
                        pipe.send(Frame(FrameKind.READY, payload=INFO.SerializeToString()))
                case FrameKind.OPEN:
                    inbox.begin(frame.session)
                    pipe.send(Frame(FrameKind.OPENED, frame.session))
                case FrameKind.COMMAND:
                    answer(inbox, frame)
                case FrameKind.CLOSE:
                    inbox.end()


def answer(inbox: Inbox, frame: Frame) -> None:
    command = pb.RunSessionRequest.FromString(frame.payload)
    match command.plan.step_id:
        case 666:
            inbox.send_front(Frame(FrameKind.FAILED, frame.session, b"plan.step_id: 666 does not follow"))
        case 999:
            os.kill(os.getpid(), signal.SIGKILL)
        case 555:
            return
        case step_id:
            token = pb.SampledToken(seq_id=1, token_id=frame.session)
            event = pb.RunSessionResponse(result=pb.StepResult(step_id=step_id, sampled=[token]))
            inbox.send(Frame(FrameKind.EVENT, frame.session, event.SerializeToString()))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
