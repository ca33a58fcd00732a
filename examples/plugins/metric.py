"""A metric of the rollouts of a step."""


def answered(groups):
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    answers = sum(t.stop_reason == "answered" for t in trajectories)
    return {"mine/answered": answers / max(1, len(trajectories))}
