from scheduler_svc.core.save_policy import SaveLimits, SavePolicy

BESIDE = SaveLimits(num_blocks=64, delay_s=0.5, at_rest=False)
COMPETING = SaveLimits.of(1000, copies_compete=True)


def test_a_few_blocks_wait_for_others() -> None:
    policy = SavePolicy(BESIDE)
    assert not policy.should_save(3, 1, 10.0)
    assert policy.due_s == 10.5
    assert not policy.should_save(3, 0, 10.4)
    assert policy.should_save(3, 1, 10.5)


def test_enough_blocks_do_not_wait() -> None:
    assert SavePolicy(BESIDE).should_save(64, 1, 0.0)


def test_once_begun_everything_goes_out() -> None:
    policy = SavePolicy(BESIDE)
    assert policy.should_save(70, 1, 0.0)
    assert policy.should_save(6, 1, 0.0)
    assert policy.due_s is None
    assert not policy.should_save(0, 1, 0.0)
    assert not policy.should_save(1, 1, 0.1)


def test_copies_that_compete_with_computing_wait_for_rest() -> None:
    policy = SavePolicy(COMPETING)
    assert not policy.should_save(200, 2, 0.0)
    assert policy.should_save(200, 0, 0.1)


def test_but_not_for_ever_and_not_for_any_number() -> None:
    assert SavePolicy(COMPETING).should_save(500, 2, 0.0)
    policy = SavePolicy(COMPETING)
    assert not policy.should_save(1, 2, 0.0)
    assert policy.should_save(1, 2, 10.0)


def test_nothing_to_save_is_never_due() -> None:
    policy = SavePolicy(COMPETING)
    assert not policy.should_save(0, 0, 5.0)
    assert policy.due_s is None


def test_nothing_waits_while_more_blocks_are_expected_than_can_be_taken_without_loss() -> None:
    policy = SavePolicy(COMPETING)
    policy.expect(50.0, num_clean_blocks=40)
    assert policy.should_save(3, 2, 0.0)
    policy.should_save(0, 2, 0.1)
    policy.expect(50.0, num_clean_blocks=60)
    assert not policy.should_save(3, 2, 0.2)
