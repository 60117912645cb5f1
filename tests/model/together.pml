/*
 * Micro-batches with collectives inside, which all ranks of a job keep or all run again (docs/collectives.md): each rank's
 * thread, what takes its memory, the devices.
 *
 * A rank asks for a number inside its gate. What closes the gate waits until the rank is outside: then the question is taken
 * back by a pause, or it is granted and made first. When memory of a micro-batch goes, what the rank goes on to launch is
 * dropped, then a new epoch begins, which drops on all ranks what was not granted. A micro-batch belongs to the epoch in
 * which it made its first call; its end takes a number like its calls. What is called between two micro-batches is never
 * dropped, even if the thread has begun the next one before that call's turn has come.
 *
 *   -DDEATH        a rank may be killed at any instant
 *   Each of these takes something away, and something must then be found wrong:
 *   -DNO_TELL      a rank runs a micro-batch again without beginning an epoch
 *   -DTELL_FIRST   an epoch begins before what the rank launches is dropped
 *   -DNO_BEGIN     a call belongs to the epoch in which it is asked about, whatever its micro-batch began in
 *   -DNO_BACK      a question that was taken back and is dropped leaves its epoch as it is
 *   -DNO_DEBT      a question is taken back though it is granted
 *   -DNO_AGAIN     what was called between two micro-batches is not asked for again when an epoch begins
 */
#ifndef RANKS
#define RANKS 2
#endif
#ifndef BATCHES
#define BATCHES 2
#endif
#ifndef INSIDE
#define INSIDE 1  /* collectives in a micro-batch */
#endif
#ifndef TAKEN
#define TAKEN RANKS  /* ranks whose memory is asked for */
#endif
#ifndef TIMES
#define TIMES 1  /* each of them */
#endif
#ifndef SHORT
#define SHORT 0  /* ranks that may find no memory */
#endif
#define CALLS (INSIDE + 2)  /* one before the micro-batch, those inside, its end */
#define END (INSIDE + 1)
#define MOST (BATCHES * CALLS + (TAKEN * TIMES + SHORT) * (INSIDE + 1) + 2)

/* The word. */
byte epoch, granted, pausing;
/* Of each rank: what it has arrived at; collectives on its device, which end together; its gate. */
byte arrived[RANKS], arrived_in[RANKS], running[RANKS], committed[RANKS];
bit inside[RANKS], closing[RANKS], closed[RANKS];
/* And its micro-batch: there is one; its memory has gone; the others know, or will. */
bit begun[RANKS], lost[RANKS], told[RANKS];
byte item[RANKS];         /* the call whose turn it is */
bit short_of[RANKS];      /* it has found no memory, and says so */
bit dead, ended[RANKS];
/* What the first rank to make a number has made, from 1, and the epoch that its micro-batch began in. */
byte work[MOST], work_of[MOST];

/* Whoever finds that all have arrived moves the word on. */
inline try_to_grant() {
  atomic {
    do
    :: ok = 1;
       i = 0;
       do
       :: i < RANKS ->
          if
          :: arrived[i] != granted + 1 || arrived_in[i] != epoch -> ok = 0
          :: else
          fi;
          i++
       :: i == RANKS -> break
       od;
       if
       :: ok && pausing == 0 -> granted++
       :: else -> break
       fi
    od;
    ok = 0; i = 0
  }
}

inline arrive() {
  atomic { number++; arrived[r] = number; arrived_in[r] = known; asked = 1 };
  try_to_grant()
}

proctype rank(byte r) {
  byte number, known, began, batch, i;
  bit ok, asked, ahead;
  do
  :: batch == BATCHES -> break
  :: else ->
     /* A call is made by the thread; later it comes to its turn. */
     if
     :: item[r] <= 1 && !ahead ->
        if
        :: atomic { begun[r] = 1; told[r] = 0; ahead = 1 };
           began = epoch
        :: item[r] == 0
        fi
     :: else
     fi;
     asked = 0;
turn:
     atomic { (!closing[r] && !closed[r]) || dead; inside[r] = 1 };
     if
     :: dead -> goto over
     :: else
     fi;
     if
     :: lost[r] && item[r] > 0 -> goto gone
     :: else
     fi;
     if
     :: asked -> pausing--; try_to_grant()
     :: else ->
        if
#ifdef NO_BEGIN
        :: known = epoch
#else
        :: item[r] == 0 -> known = epoch
        :: item[r] == 1 -> known = began
        :: else
#endif
        fi;
        arrive()
     fi;
waits:
     do
     :: atomic { granted >= number -> goto make }
     :: atomic { granted < number && epoch != known ->
          known = epoch; number--; asked = 0
        };
        if
        :: item[r] == 0 ->
#ifndef NO_AGAIN
           arrive()
#else
           skip
#endif
        :: else ->  /* the others have dropped it */
           atomic { lost[r] = 1; told[r] = 1 };
           goto gone
        fi
     :: atomic { (closing[r] || lost[r] && item[r] > 0) && !dead ->
          pausing++;
#ifndef NO_DEBT
          if
          :: granted >= number -> pausing--; goto make
          :: else
          fi;
#endif
          inside[r] = 0
        };
        goto turn
     :: dead -> goto over
     od;
make:
     atomic {
       if
       :: work[number] == 0 ->
          work[number] = batch * CALLS + item[r] + 1;
          work_of[number] = (item[r] == 0 -> 0 : began)
       :: else ->
          assert(work[number] == batch * CALLS + item[r] + 1);
          assert(item[r] == 0 || work_of[number] == began)
       fi;
       assert(dead || !closed[r]);
       if
       :: item[r] < END -> running[r]++; item[r]++
       :: else -> assert(dead || !lost[r]); committed[r]++; batch++; item[r] = 0; begun[r] = 0; ahead = 0
       fi;
       asked = 0;
       inside[r] = 0
     };
     goto next;
gone:
     atomic {
       if
       :: asked ->  /* it has been taken back, and will not be asked again */
          pausing--;
          if
#ifdef NO_BACK
          :: skip
#else
          :: epoch == known -> epoch++
          :: else
#endif
          fi;
          known = epoch;
          number--
       :: else
       fi;
       asked = 0;
       inside[r] = 0
     };
     try_to_grant();
     !short_of[r];
     atomic {
       if
       :: !told[r] ->
#ifndef NO_TELL
          epoch++;
#endif
          told[r] = 1
       :: else
       fi;
       begun[r] = 0; lost[r] = 0; item[r] = 1; ahead = 0
     };
next:
     skip
  od;
over:
  ended[r] = 1
}

/* Takes memory of a micro-batch, if there is one; else it was only a pause. */
proctype taker(byte r) {
  byte n;
  bit again;
  do
  :: n == TIMES || dead -> break
  :: else ->
     n++;
     closing[r] = 1;
     !inside[r] || dead;
     closed[r] = 1;
     running[r] == 0 || dead;
#ifdef TELL_FIRST
     atomic {
       again = begun[r] && !lost[r] && !told[r];
       if
       :: again -> epoch++; told[r] = 1
       :: else
       fi
     };
     closed[r] = 0; closing[r] = 0;
     atomic {
       if
       :: again && begun[r] -> lost[r] = 1
       :: else
       fi
     }
#else
     atomic { again = begun[r] && !lost[r]; lost[r] = lost[r] || again };
     if
     :: again ->
        atomic {
          if
          :: !told[r] ->
#ifndef NO_TELL
             epoch++;
#endif
             told[r] = 1
          :: else
          fi
        }
     :: else
     fi;
     atomic { closed[r] = 0; closing[r] = 0 }
#endif
  od
}

/* The thread of a rank finds no memory for what comes later in its micro-batch. */
proctype shortage(byte r) {
  if
  :: atomic { begun[r] && !lost[r] && item[r] < END && !dead -> lost[r] = 1; short_of[r] = 1 };
     atomic {
       if
       :: !told[r] -> epoch++; told[r] = 1
       :: else
       fi;
       short_of[r] = 0
     }
  :: true
  fi
}

/* A collective ends when it runs everywhere. */
proctype devices() {
  byte i;
end:
  do
  :: atomic {
       (running[0] > 0 && running[1] > 0
#if RANKS > 2
        && running[2] > 0
#endif
       ) ->
       i = 0;
       do
       :: i < RANKS -> running[i]--; i++
       :: i == RANKS -> break
       od;
       i = 0
     }
  :: dead -> break
  od
}

#ifdef DEATH
proctype killer() {
  dead = 1
}
#endif

init {
  byte i;
  atomic {
    do
    :: i < RANKS ->
       run rank(i);
       if
       :: i < TAKEN -> run taker(i)
       :: else
       fi;
       if
       :: i < SHORT -> run shortage(i)
       :: else
       fi;
       i++
    :: i == RANKS -> break
    od;
    run devices();
#ifdef DEATH
    run killer()
#endif
  }
  i = 0;
  do
  :: i < RANKS -> ended[i]; assert(dead || committed[i] == BATCHES); i++
  :: i == RANKS -> break
  od
}
