"""A metric of the rollouts of a step."""


def answered(groups):
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    return {"mine/answered": sum(t.stop_reason == "answered" for t in trajectories) / len(trajectories)}
