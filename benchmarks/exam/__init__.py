"""The exam: nine tasks on synthetic and real eyes that tell a learned encoder from an untrained one (docs/exam)."""
